"""Seeded faults of `crossover`, on step times of a machine that reads at a fixed bandwidth and pays fixed costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from artifact.account import Mode, Setting, n_star, step_bytes
from artifact.measure.crossing_cells import Plan, sweep_group
from artifact.profiles import Profile
from artifact.shapes import known_shape
from claims import crossover

from . import each

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)

Row = dict[str, Any]
SHAPE = known_shape("SmolLM2-135M")
BANDWIDTH_GBPS = 20.0
Times = Callable[[float, float, int], float]


def machine(cost_p: float = 1.5, cost_kv: float = 0.3, dense_cost: float = 2.0) -> Times:
    """Step time in ms of a machine that reads at a fixed bandwidth and pays fixed kernel costs."""

    def ms(r_p: float, r_kv: float, n: int) -> float:
        setting = Setting(r_p, r_kv, weight_bits=32, kv_bits=32)
        mode = {(0, 0): Mode.DENSE, (1, 0): Mode.PROJECTION, (0, 1): Mode.KV, (1, 1): Mode.BOTH}[r_p < 1, r_kv < 1]
        cost = dense_cost + cost_p * (r_p < 1) + cost_kv * (r_kv < 1)
        return step_bytes(SHAPE, setting, n, mode) / BANDWIDTH_GBPS / 1e6 + cost

    return ms


def rows_of(
    times: Times, blocks: int = 5, noise: float = 0.004, seed: int = 0, spread: float = 0.12, longest: int = 7936
) -> list[Row]:
    """Rows as the cells store them: sweep rows at both ends, crossing rows around the true crossing of each pair, as
    far as the longest context allows.
    """
    rng = np.random.default_rng(seed)

    def row(cell: str, block: int, n: int, r_p: float, r_kv: float) -> Row:
        level = times(r_p, r_kv, n) * (1 + noise * rng.standard_t(4, size=40))
        mode = {(0, 0): "dense", (1, 0): "projection", (0, 1): "kv", (1, 1): "both"}[r_p < 1, r_kv < 1]
        return {
            "cell": f"block-{block}", "part": cell, "block": block,
            "context": n, "r_p": r_p, "r_kv": r_kv, "mode": mode,
            "ms": level.tolist(), "counted_r_p": r_p, "counted_r_kv": r_kv, "shape": dataclasses.asdict(SHAPE),
            "weight_bits": 32, "kv_bits": 32, "read_gbps": BANDWIDTH_GBPS, "projection_bytes": 1.0, "kv_bytes": 1.0,
            "head_bytes": 1.0, "origin": "live", "text": "simulated",
        }  # fmt: skip

    rows = []
    for block in range(blocks):
        swept = sweep_group(Plan("crossover", crossover.PAIRS, 50), longest, "sweep")
        rows += [row("sweep", block, one["context"], one["r_p"], one["r_kv"]) for one in swept]
        for r_p, r_kv in crossover.PAIRS:
            star = n_star(SHAPE, Setting(r_p, r_kv, weight_bits=32, kv_bits=32))
            for share in (1 - spread, 1 - spread / 3, 1 + spread / 3, 1 + spread):
                n = min(int(0.87 * star * share), longest - int(100 * (1 - share)) - 200)
                rows += [row("crossing", block, n, *mode) for mode in ((r_p, 1.0), (1.0, r_kv))]
    return rows


def honest() -> list[Row]:
    """Rows of five blocks on a machine without defects."""
    return rows_of(machine())


@each
def dense_posing_as_projection(row: Row) -> None:
    """The projection mode silently runs dense."""
    if row["mode"] == "projection":
        row["ms"] = [machine(0.0, 0.0)(1.0, 1.0, row["context"]) * (1 + 1e-3 * i) for i in range(40)]


@each
def kv_ratio_ignored(row: Row) -> None:
    """The KV mode ignores its keep ratio and reads the whole cache."""
    if row["mode"] == "kv":
        row["ms"] = [machine()(1.0, 1.0, row["context"]) + 0.3 + 1e-3 * i for i in range(40)]


@each
def stale_cache(row: Row) -> None:
    """The KV mode of a crossing cell decodes on the cache of a 1K prompt, whatever its context."""
    if row["mode"] == "kv" and row["part"] == "crossing":
        row["ms"] = [machine()(1.0, row["r_kv"], 1024) + 1e-3 * i for i in range(40)]


@each
def unsynchronised_timer(row: Row) -> None:
    """The clock stops before the work: sparse modes seem to take the launch time alone."""
    if row["mode"] != "dense":
        row["ms"] = [0.3 + 1e-3 * i for i in range(40)]


@each
def swapped_timer(row: Row) -> None:
    """Samples of the two branches are stored under each other's name."""
    if row["mode"] in ("projection", "kv"):
        r_p, r_kv = (1.0, 0.3) if row["mode"] == "projection" else (0.5, 1.0)
        row["ms"] = [machine()(r_p, r_kv, row["context"]) + 1e-3 * i for i in range(40)]


@each
def wrong_mask(row: Row) -> None:
    """The KV mode reads a window of half the entries it claims."""
    if row["mode"] == "kv" and row["part"] == "crossing":
        row["ms"] = [machine()(1.0, row["r_kv"] / 2, row["context"]) - 1.0 + 1e-3 * i for i in range(40)]


@each
def wasteful_dense(row: Row) -> None:
    """Dense attention repeats KV heads: three times the cache bytes."""
    if row["mode"] == "dense":
        extra = 2 * SHAPE.layers * SHAPE.kv_values_per_token * 4 * row["context"] / BANDWIDTH_GBPS / 1e6
        row["ms"] = [value + extra for value in row["ms"]]


def unequal_arms(rows: list[Row]) -> None:
    """One step of the KV mode is lost, the other arm keeps its own."""
    next(row for row in rows if row["mode"] == "kv")["ms"].pop()


UNEQUAL = unequal_arms
FAULTS = (
    dense_posing_as_projection,
    kv_ratio_ignored,
    stale_cache,
    unsynchronised_timer,
    swapped_timer,
    wrong_mask,
    wasteful_dense,
    unequal_arms,
)
