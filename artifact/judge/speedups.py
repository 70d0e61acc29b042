"""Speedups over dense decoding beside their byte bounds, per context and block, from stored rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from artifact.account import Mode, Setting, bound, projection_saving
from artifact.judge.levels import with_levels
from artifact.shapes import Shape

Row = dict[str, Any]
MODES = {"projection": Mode.PROJECTION, "kv": Mode.KV, "both": Mode.BOTH}


@dataclass(frozen=True)
class At:
    """One context of one block: dense ms, gain and byte bound per mode, and the projection's kernel cost in ms.

    The cost is its step time beyond the byte saving, T_P - T_dense + dB_P / bandwidth, with the bandwidth that dense
    decoding reaches on projections and cache together in the same round.
    """

    dense_ms: float
    gain: dict[str, float]
    bound: dict[str, float]
    cost_p_ms: float


def blocks_of(rows: Sequence[Row]) -> list[dict[int, At]]:
    """Return per block the contexts measured. Raises ValueError when a context lacks a mode or arms differ."""
    blocks = []
    for block in sorted({int(row["block"]) for row in rows}):
        mine = with_levels([row for row in rows if int(row["block"]) == block])
        contexts = sorted({int(row["context"]) for row in mine})
        blocks.append({n: _at([row for row in mine if int(row["context"]) == n]) for n in contexts})
    return blocks


def _at(rows: list[Row]) -> At:
    by_mode = {row["mode"]: row for row in rows}
    missing = {"dense", *MODES} - by_mode.keys()
    if missing:
        raise ValueError(f"at {rows[0]['context']} tokens: missing modes {sorted(missing)}")
    dense = by_mode["dense"]
    times = {mode: row["level_ms"] for mode, row in by_mode.items()}
    dense_ms = times["dense"]
    shape, n = Shape(**dense["shape"]), int(dense["context"])

    def setting(row: Row) -> Setting:
        bits = {"weight_bits": row["weight_bits"], "kv_bits": row["kv_bits"]}
        return Setting(min(row["counted_r_p"], 1.0), min(row["counted_r_kv"], 1.0), **bits)

    read = dense["projection_bytes"] + dense["kv_bytes"] + dense["head_bytes"]
    saved = projection_saving(shape, setting(by_mode["projection"]))
    over = times["projection"] - times["dense"]
    return At(
        dense_ms=dense_ms,
        gain={mode: dense_ms / times[mode] for mode in MODES},
        bound={mode: bound(shape, setting(by_mode[mode]), n, MODES[mode]) for mode in MODES},
        cost_p_ms=over + saved * dense_ms / read,
    )


def curve(blocks: Sequence[dict[int, At]]) -> dict[str, float | str]:
    """Return the median gains and bounds over blocks as flat names such as gain_kv_1024."""
    found: dict[str, float | str] = {}
    for n in sorted(blocks[0]):
        for mode in MODES:
            found[f"gain_{mode}_{n}"] = float(np.median([block[n].gain[mode] for block in blocks]))
            found[f"bound_{mode}_{n}"] = float(np.median([block[n].bound[mode] for block in blocks]))
        found[f"cost_p_ms_{n}"] = float(np.median([block[n].cost_p_ms for block in blocks]))
    return found


def threshold_tokens(blocks: Sequence[dict[int, At]]) -> float:
    """Return the shortest measured context from which the composition is fastest at every longer one; inf if none."""
    threshold = float("inf")
    for n in sorted(blocks[0], reverse=True):
        median = {mode: float(np.median([block[n].gain[mode] for block in blocks])) for mode in MODES}
        if median["both"] < max(median["projection"], median["kv"], 1.0):
            break
        threshold = float(n)
    return threshold
