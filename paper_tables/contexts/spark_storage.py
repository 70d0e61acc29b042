"""SparK's storage per key at every pruning ratio, and steps of packed caches beside dense ones."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("spark_storage",)


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per ratio, one per timed mode. Raises TableMissing when nothing was counted."""
    keys = [row for row in rows if row.get("kind") == "key"]
    motivation = next((row for row in rows if row.get("kind") == "motivation"), None)
    if not keys or motivation is None:
        raise TableMissing("no stored bytes in this run")
    timed = [row for row in rows if row.get("kind") == "timing"]
    origin = motivation["origin"]
    return {
        "mha": Figure(f"{motivation['mha_gb']:.1f} GB", origin),
        "gqa": Figure(f"{motivation['gqa_gb']:.1f} GB", origin),
        "printed": Figure(f"{paper['spark']['figures']['motivation']['printed']} GB", "paper"),
        "rows": [_key(row) for row in keys],
        "timed": [_timed(label, timed) for label in dict.fromkeys(row["label"] for row in timed)],
    }


def _key(row: Row) -> dict[str, Any]:
    stored = Figure(f"{row['stored_bytes']:g} of {row['dense_bytes']}", row["origin"])
    return {
        "pruned": Figure(f"{row['pruned']:.0%}", row["origin"]),
        "signs": "yes" if row["signs"] else "no",
        "cells": [stored, Figure(f"{row['entry_saved']:.1%}", row["origin"])],
    }


def _timed(label: str, timed: list[Row]) -> dict[str, Any]:
    own = [row for row in timed if row["label"] == label]
    dense = {row["block"]: row for row in timed if row["label"] == "dense"}
    gain = median(
        d / o for row in own if row["block"] in dense for d, o in zip(dense[row["block"]]["ms"], row["ms"], strict=True)
    )
    origin = own[0]["origin"]
    texts = (f"{own[0]['storage_bytes'] / 1e6:,.1f} MB", f"{own[0]['counted_r_kv']:.1%}", f"{gain:.2f}x")
    return {"label": label, "cells": [Figure(text, origin) for text in texts]}
