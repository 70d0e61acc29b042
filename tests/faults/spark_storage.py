"""Seeded faults of `spark_storage`, on stored bytes and step times."""

from __future__ import annotations

from ._kv import EMBEDDED, Row, storage_rows

PROFILE = EMBEDDED
honest = storage_rows


def mask_forgotten(rows: list[Row]) -> None:
    """The 16 bytes of the mask of a key are not counted"""
    for row in rows:
        if row["kind"] == "key":
            row["stored_bytes"] -= 16


def pruned_channels_kept(rows: list[Row]) -> None:
    """Pruned channels stay in the cache on top of the selection"""
    for row in rows:
        if row.get("label") == "snapkv+spark80":
            row["kept_share"] = 0.29


FAULTS = (mask_forgotten, pruned_channels_kept)
