"""Seeded faults of `speedup_bounds`, on four modes at four contexts."""

from __future__ import annotations

from typing import Any

import numpy as np

from artifact.account import Setting, head_bytes, kv_bytes, projection_bytes
from artifact.profiles import Profile

from .crossover import SHAPE, machine, rows_of

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)

Row = dict[str, Any]
DENSE = Setting(weight_bits=32, kv_bits=32)


def honest(blocks: int = 3) -> list[Row]:
    """Four modes at four contexts."""
    times, rng = machine(dense_cost=0.0), np.random.default_rng(1)
    template = rows_of(machine(), blocks=1)[0]
    rows = []
    for block in range(blocks):
        for n in (1024, 2048, 4096, 7936):
            read = {
                "projection_bytes": projection_bytes(SHAPE, DENSE),
                "kv_bytes": kv_bytes(SHAPE, DENSE, n),
                "head_bytes": head_bytes(SHAPE, DENSE),
            }
            for r_p, r_kv, mode in (
                (1.0, 1.0, "dense"),
                (0.5, 1.0, "projection"),
                (1.0, 0.3, "kv"),
                (0.5, 0.3, "both"),
            ):
                ms = times(r_p, r_kv, n) * (1 + 0.003 * rng.standard_normal(30))
                row = {**template, "cell": f"sweep-{block}", "block": block, "context": n, "mode": mode, "r_p": r_p}
                row |= {"r_kv": r_kv, "counted_r_p": r_p, "counted_r_kv": r_kv, "ms": ms.tolist(), "path": "splitk"}
                rows.append(row | read)
    return rows


def kv_runs_dense(rows: list[Row]) -> None:
    """The KV mode silently reads the whole cache."""
    for row in rows:
        if row["mode"] == "kv":
            row["ms"] = [machine(dense_cost=0.0)(1.0, 1.0, row["context"]) + 1e-3 * i for i in range(30)]


def dense_wastes(rows: list[Row]) -> None:
    """Dense attention repeats KV heads: every gain exceeds its bound."""
    for row in rows:
        if row["mode"] == "dense":
            row["ms"] = [2.5 * value for value in row["ms"]]


def cost_grows_with_context(rows: list[Row]) -> None:
    """The projection branch pays for a copy of the cache in every step."""
    for row in rows:
        if row["mode"] in ("projection", "both"):
            row["ms"] = [value + 2e-3 * row["context"] for value in row["ms"]]


def unequal_arms(rows: list[Row]) -> None:
    """One step of the projection mode is lost."""
    next(row for row in rows if row["mode"] == "projection")["ms"].pop()


UNEQUAL = unequal_arms
FAULTS = (kv_runs_dense, dense_wastes, cost_grows_with_context, unequal_arms)
