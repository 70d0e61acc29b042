"""Batched crossovers from stored rows (crossover, section 3.3, Appendix F). Pure.

    n*_B = P (1 - u_B) / (2 B kv_heads head_dim (1 - r_KV))

u_B, the share of the projection weights that any of B sequences activates, is counted by decode steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from artifact.account import Setting, n_star
from artifact.judge.crossing import gap, pick
from artifact.shapes import Shape

Row = dict[str, Any]


def unions(rows: Sequence[Row]) -> list[dict[int, float]]:
    """Per block, u_B by batch size in increasing order. ValueError when blocks counted different sizes."""
    found = [
        {row["batch"]: row["u_b"] for row in sorted(rows, key=lambda row: row["batch"]) if row["block"] == block}
        for block in sorted({row["block"] for row in rows})
    ]
    if any(list(one) != list(found[0]) for one in found):
        raise ValueError("blocks counted unions of different batch sizes")
    return found


def crossover(shape: Shape, batch: int, u_b: float, r_kv: float, bits: tuple[float, float] = (16, 16)) -> float:
    """n*_B in tokens; at one sequence u_B is its own keep ratio. bits: of a weight and of a cache element."""
    if batch == 1:
        return n_star(shape, Setting(u_b, r_kv, *bits))
    return n_star(shape, Setting(u_b, r_kv, *bits, batch=batch, u_b=u_b))


def crossovers(found: dict[int, float], shape: Shape, r_kv: float, bits: tuple[float, float]) -> dict[int, float]:
    """n*_B per batch size of one block."""
    return {batch: crossover(shape, batch, u_b, r_kv, bits) for batch, u_b in found.items()}


def batched_n_star(rows: Sequence[Row], batch: int, r_p: float, r_kv: float) -> float:
    """n*_B from the union that the timed projection rows of a batch counted themselves."""
    sparse = [row for row in rows if row["r_p"] == r_p and row["r_kv"] == 1.0 and row["batch"] == batch]
    if not sparse:
        raise ValueError(f"no projection row of a batch of {batch}")
    u_b = sum(row["u_b"] for row in sparse) / len(sparse)
    bits = (sparse[0]["weight_bits"], sparse[0]["kv_bits"])
    return crossover(Shape(**sparse[0]["shape"]), batch, u_b, r_kv, bits)


def timed_unions(rows: Sequence[Row]) -> list[Row]:
    """The unions that timed projection rows read themselves, one row per block and batch size."""
    sparse = [row for row in rows if row["r_p"] < 1 and row["r_kv"] == 1]
    found = []
    for block, batch in sorted({(row["block"], row["batch"]) for row in sparse}):
        mine = [row for row in sparse if (row["block"], row["batch"]) == (block, batch)]
        mean = sum(row["u_b"] for row in mine) / len(mine)
        found.append({"block": block, "batch": batch, "u_b": mean, "shape": mine[0]["shape"]})
    return found


def leads(rows: Sequence[Row], r_p: float, r_kv: float) -> tuple[int, dict[int, list[float]]]:
    """What the projection branch takes longer than the KV branch, ms per batch size and block, at the longest context
    that the sweeps of all batch sizes hold, where caches weigh most; between contexts on the straight line. rows carry
    `level_ms`.

    Empty when fewer than two batch sizes were timed or their sweeps have no context in common.
    """
    blocks, batches = sorted({row["block"] for row in rows}), sorted({row["batch"] for row in rows})
    gaps: dict[int, list[dict[int, float]]] = {batch: [] for batch in batches}
    for batch in batches:
        for block in blocks:
            mine = [row for row in rows if row["batch"] == batch and row["block"] == block]
            gaps[batch].append(gap(pick(mine, r_p, 1.0), pick(mine, 1.0, r_kv)))
    if len(batches) < 2 or not all(one for per_block in gaps.values() for one in per_block):
        return 0, {}
    common = min(max(one) for per_block in gaps.values() for one in per_block)
    if common < max(min(one) for per_block in gaps.values() for one in per_block):
        return 0, {}
    found = {
        batch: [float(np.interp(common, list(one), list(one.values()))) for one in per_block]
        for batch, per_block in gaps.items()
    }
    return common, found
