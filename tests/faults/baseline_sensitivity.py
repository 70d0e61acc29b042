"""Seeded faults of `baseline_sensitivity`, on a 30% window against dense decoding by three attention paths."""

from __future__ import annotations

from typing import Any

import numpy as np

from artifact.profiles import Profile

from .crossover import machine, rows_of

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)

Row = dict[str, Any]


def honest(blocks: int = 3) -> list[Row]:
    """A window of 30% against dense decoding by three paths, at the longest context of the simulated sweep."""
    sweep = [row for row in rows_of(machine(), blocks) if row["part"] == "sweep" and row["context"] == 7936]
    factors = {"masked": 3.1, "fused": 1.6, "splitk": 1.0}
    rows = []
    for block in range(blocks):
        own = [row for row in sweep if row["block"] == block]
        dense = next(row for row in own if row["mode"] == "dense")
        window = next(row for row in own if row["mode"] == "kv" and row["r_kv"] == 0.3)
        common = {"cell": f"longest-{block}", "ops_ms": {"attention": 2.0}, "attention_backend": "simulated"}
        for path, factor in factors.items():
            rows.append({**dense, **common, "path": path, "ms": (factor * np.array(dense["ms"])).tolist()})
        rows.append({**window, **common, "path": "splitk", "method": "window"})
    return rows


def masked_runs_fused(rows: list[Row]) -> None:
    """The masked path falls to the fused kernel: two names, one baseline."""
    for row in rows:
        if row["path"] == "masked":
            twin = next(r for r in rows if r["path"] == "fused" and r["block"] == row["block"])
            row["ms"] = list(twin["ms"])


def split_baseline_wastes(rows: list[Row]) -> None:
    """The split-K baseline repeats KV heads, so that a window gains more than its bytes allow."""
    for row in rows:
        if row["path"] == "splitk" and row["mode"] == "dense":
            row["ms"] = [1.9 * value for value in row["ms"]]


def one_path_under_every_name(rows: list[Row]) -> None:
    """The path option is ignored: every baseline is split-K."""
    for row in rows:
        if row["mode"] == "dense":
            twin = next(
                r for r in rows if r["path"] == "splitk" and r["mode"] == "dense" and r["block"] == row["block"]
            )
            row["ms"] = list(twin["ms"])


def unequal_arms(rows: list[Row]) -> None:
    """One step of the masked baseline is lost."""
    next(row for row in rows if row["path"] == "masked")["ms"].pop()


UNEQUAL = unequal_arms
FAULTS = (masked_runs_fused, split_baseline_wastes, one_path_under_every_name, unequal_arms)
