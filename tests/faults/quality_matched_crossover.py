"""Seeded faults of `quality_matched_crossover`, on sweeps with the paper's perplexity increases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from artifact.measure.configuration import Configuration
from artifact.profiles import Profile
from artifact.shapes import known_shape

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)

Row = dict[str, Any]
SHAPE = known_shape("Llama-3.1-8B")


def rows_of(projection: dict[float, float], selection: dict[float, float], noise: float = 1e-3) -> list[Row]:
    """Window rows whose perplexity increases (shares of dense) are as given."""
    rng = np.random.default_rng(0)
    rows: list[Row] = [{"kind": "shape", "shape": dataclasses.asdict(SHAPE)}]
    arms = [(Configuration(), 0.0)]
    arms += [(Configuration(r_p=keep), share) for keep, share in projection.items()]
    arms += [(Configuration(r_kv=keep, method="snapkv"), share) for keep, share in selection.items()]
    for window in range(8):
        level = 1.8 + 0.1 * rng.standard_normal()
        for arm, share in arms:
            nll = level + math.log1p(share) + noise * rng.standard_normal()
            rows.append({
                **arm.record(), "kind": "window", "window": window, "protocol": "p", "nll": [nll] * 3,
                "window_tokens_hash": f"w{window}",
            })  # fmt: skip
    return rows


# The paper: 10% KV keep costs 0.06 of 6.09; the matched projection keeps are 0.691, 0.584 and 0.500 (derived).
PROJECTION = {0.691: 0.2 / 6.09, 0.584: 0.5 / 6.09, 0.5: 1.0 / 6.09}
SELECTION = {0.5: 0.001, 0.2: 0.001, 0.1: 0.06 / 6.09}


def paper_rows(noise: float = 1e-6) -> list[Row]:
    projection = {0.7: 0.19 / 6.09, 0.6: 0.44 / 6.09, **PROJECTION}
    return rows_of(dict(sorted(projection.items(), reverse=True)), SELECTION, noise)


def honest() -> list[Row]:
    """The paper's sweep."""
    return paper_rows()


def projection_ran_dense(rows: list[Row]) -> None:
    """The projection mode silently runs dense: no keep ratio costs anything."""
    dense = {row["window"]: row["nll"] for row in rows if row.get("label") == "dense"}
    for row in rows:
        if row.get("r_p", 1.0) < 1:
            row["nll"] = list(dense[row["window"]])


def selection_ratio_ignored(rows: list[Row]) -> None:
    """Every selection reads a tenth of what it says, at a loss that no budget admits."""
    for row in rows:
        if row.get("r_kv", 1.0) < 1:
            row["nll"] = [value + 1.0 for value in row["nll"]]


def unequal_arms(rows: list[Row]) -> None:
    """One window is lost from one arm."""
    rows.remove(next(row for row in rows if row.get("label") == "kv20"))


UNEQUAL = unequal_arms
FAULTS = (projection_ran_dense, selection_ratio_ignored, unequal_arms)
