"""What one KV method gains over dense baselines that differ in their attention path, from stored rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from artifact.account import Mode, Setting, bound
from artifact.judge.levels import with_levels
from artifact.shapes import Shape

Row = dict[str, Any]


def gains_by_block(rows: Sequence[Row], paths: Sequence[str]) -> tuple[list[dict[str, float]], list[float]]:
    """Return per block the gain over each path's dense step, and the byte bound of the KV method.

    Raises ValueError when a block lacks a path or its arms hold different numbers of samples.
    """
    gains, bounds = [], []
    for block in sorted({int(row["block"]) for row in rows}):
        mine = with_levels([row for row in rows if int(row["block"]) == block])
        dense = {row["path"]: row for row in mine if row["mode"] == "dense"}
        sparse = next((row for row in mine if row["mode"] == "kv"), None)
        if sparse is None or set(paths) - dense.keys():
            raise ValueError(
                f"block {block} holds dense rows for {sorted(dense)}, expected {sorted(paths)} and a KV row"
            )
        gains.append({path: dense[path]["level_ms"] / sparse["level_ms"] for path in paths})
        setting = Setting(1.0, sparse["counted_r_kv"], weight_bits=sparse["weight_bits"], kv_bits=sparse["kv_bits"])
        bounds.append(bound(Shape(**sparse["shape"]), setting, sparse["context"], Mode.KV))
    return gains, bounds


def path_shares(rows: Sequence[Row], paths: Sequence[str]) -> dict[str, float | str]:
    """Return per path the median gain, the share of read bandwidth its attention reached and the backend that ran."""
    found: dict[str, float | str] = {}
    gains, bounds = gains_by_block(rows, paths)
    for path in paths:
        mine = [row for row in rows if row["mode"] == "dense" and row["path"] == path]
        shares = [row["kv_bytes"] / row["ops_ms"]["attention"] / 1e6 / row["read_gbps"] for row in mine]
        found[f"{path}_gain"] = float(np.median([gain[path] for gain in gains]))
        found[f"{path}_share_of_read_bandwidth"] = float(np.median(shares))
        found[f"{path}_backend"] = str(mine[0]["attention_backend"])
    found["byte_bound"] = float(np.median(bounds))
    return found
