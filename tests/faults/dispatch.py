"""Seeded faults of `dispatch`, on made-up step times of four modes and a recorded run of the same kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from artifact.deploy.mix import load
from artifact.profiles import Profile
from artifact.shapes import known_shape

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
CONTEXTS = (1024, 4096, 7936)
RATIOS = {"dense": (1.0, 1.0), "projection": (0.5, 1.0), "kv": (1.0, 0.3), "both": (0.5, 0.3)}

Row = dict[str, Any]


def step_ms(mode: str, context: int) -> float:
    """22 ms of weights, of which sparse projections save 8, and 1.5 us per cached entry that is read."""
    r_p, r_kv = RATIOS[mode]
    return (14.0 if r_p < 1 else 22.0) + 0.0015 * r_kv * context


def honest() -> list[Row]:
    """The mix, four blocks of this run, and the same times as a recorded run."""
    shape = dataclasses.asdict(known_shape("smollm2-135m"))
    rows: list[Row] = [{"cell": "mix", "kind": "mix", "record": load()[1]}]
    for block in range(4):
        drift = 1 + 0.004 * block
        for context in CONTEXTS:
            rows.append({"cell": f"block-{block}", "block": block, "kind": "selection", "context": context,
                         "r_kv": 0.3, "once_ms": [0.05 * context * drift] * 4})  # fmt: skip
            for mode, (r_p, r_kv) in RATIOS.items():
                rows.append({
                    "cell": f"block-{block}", "block": block, "kind": "step", "context": context, "mode": mode,
                    "r_p": r_p, "r_kv": r_kv, "ms": [step_ms(mode, context) * drift] * 8, "shape": shape,
                    "weight_bits": 32, "kv_bits": 32,
                })  # fmt: skip
        rows.append({
            "cell": "recorded", "kind": "times", "machine": "example/model", "block_of": block,
            "contexts": list(CONTEXTS), "step_ms": {mode: [step_ms(mode, n) for n in CONTEXTS] for mode in RATIOS},
            "once_ms": [[n, 0.05 * n] for n in CONTEXTS], "r_p": 0.5, "r_kv": 0.3, "shape": shape, "weight_bits": 32,
            "kv_bits": 32,
        })  # fmt: skip
    return rows


def composition_ran_one_branch(rows: list[Row]) -> None:
    """The composed mode silently reads all weights."""
    for row in rows:
        if row.get("kind") == "step" and row["mode"] == "both":
            row["ms"] = [step_ms("kv", row["context"])] * len(row["ms"])


def selection_at_every_step(rows: list[Row]) -> None:
    """The prompt is scored again at every step instead of once."""
    for row in rows:
        if row.get("kind") == "selection":
            row["once_ms"] = [200 * ms for ms in row["once_ms"]]


def gate_of_another_machine(rows: list[Row]) -> None:
    """The gate's table was measured where composition does not pay."""
    for row in rows:
        if row.get("kind") == "step" and row["block"] > 0 and row["mode"] == "both":
            row["ms"] = [3 * ms for ms in row["ms"]]


def unequal_arms(rows: list[Row]) -> None:
    """One step of one mode is lost."""
    row = next(row for row in rows if row.get("kind") == "step" and row["mode"] == "kv")
    row["ms"] = row["ms"][:-1]


UNEQUAL = unequal_arms
FAULTS = (composition_ran_one_branch, selection_at_every_step, gate_of_another_machine, unequal_arms)
