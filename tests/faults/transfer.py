"""Seeded faults of `transfer`, on step times of two checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from artifact.account import Mode, Setting, step_bytes
from artifact.profiles import Profile
from artifact.shapes import known_shape
from claims import transfer as claim

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)

Row = dict[str, Any]
SHAPES = {"first": known_shape("Llama-3.1-8B"), "second": known_shape("Mistral-7B-v0.3")}


def honest() -> list[Row]:
    rows: list[Row] = [
        {"kind": "shape", "which": which, "shape": dataclasses.asdict(shape), "cell": "shapes", "block": 0}
        for which, shape in SHAPES.items()
    ]
    for block in range(5):
        for which, shape in SHAPES.items():
            for mode, name in ((Mode.DENSE, "dense"), (Mode.PROJECTION, "projection")):
                ms = step_bytes(shape, Setting(r_p=0.5), claim.CONTEXT, mode) / 5e8 + 0.02 * block
                ms += 1.0 if mode is Mode.PROJECTION else 0.0
                rows.append({"cell": f"{which}-{block}", "block": block, "mode": name, "ms": [ms] * 10})
    return rows


def second_ran_dense(rows: list[Row]) -> None:
    """On the second checkpoint the projection mode silently runs dense."""
    for row in rows:
        if str(row["cell"]).startswith("second") and row["mode"] == "projection":
            row["ms"] = next(r["ms"] for r in rows if r["cell"] == row["cell"] and r["mode"] == "dense")


def second_gains_half(rows: list[Row]) -> None:
    """On the second checkpoint the thresholds keep far more channels than asked for."""
    for row in rows:
        if str(row["cell"]).startswith("second") and row["mode"] == "projection":
            row["ms"] = [value * 1.3 for value in row["ms"]]


def unequal_arms(rows: list[Row]) -> None:
    """One block of the second checkpoint is lost."""
    rows[:] = [row for row in rows if row["cell"] != "second-3"]


UNEQUAL = unequal_arms
FAULTS = (second_ran_dense, second_gains_half, unequal_arms)
