"""Batches at equal memory from stored rows: tokens per second of CateKV over dense decoding, and its bound. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = dict[str, Any]
KIND = "equal_memory"


@dataclass(frozen=True)
class Throughput:
    """Per block: ratio of tokens per second, CateKV over dense; bound: the same by the bytes that steps counted."""

    ratios: list[float]
    bounds: list[float]
    dense: Row
    catekv: Row


def throughput(rows: Sequence[Row]) -> Throughput | None:
    """Both modes of every block; None when no block holds both. ValueError when a block lacks one, or a budget differs.

    Interleaved steps are compared pair by pair, others by their medians.
    """
    found: dict[str, dict[int, Row]] = {"dense": {}, "catekv": {}}
    for row in rows:
        if row.get("kind") == KIND:
            found[row["label"]][row["block"]] = row
    if not found["dense"] and not found["catekv"]:
        return None
    if found["dense"].keys() != found["catekv"].keys():
        raise ValueError("a block timed one mode of a memory budget without the other")
    ratios, bounds = [], []
    for block in sorted(found["dense"]):
        dense, own = found["dense"][block], found["catekv"][block]
        if (
            dense["budget_bytes"] != own["budget_bytes"]
            or max(dense["held_bytes"], own["held_bytes"]) > (own["budget_bytes"])
        ):
            raise ValueError(f"block {block}: the two modes did not keep to one memory budget")
        sequences = own["batch"] / dense["batch"]
        ratios.append(sequences * faster(dense, own))
        bounds.append(sequences * step_bytes(dense) / step_bytes(own))
    return Throughput(ratios, bounds, found["dense"][min(found["dense"])], found["catekv"][min(found["catekv"])])


def faster(dense: Row, own: Row) -> float:
    """Time of a dense step over that of the other mode's."""
    if dense["interleaved"]:
        return median(d / o for d, o in zip(dense["ms"], own["ms"], strict=True))
    return median(dense["ms"]) / median(own["ms"])


def step_bytes(row: Row) -> float:
    """Bytes that a step of the whole batch read."""
    return float(row["projection_bytes"] + row["head_bytes"] + row["kv_bytes"])
