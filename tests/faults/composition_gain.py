"""Seeded faults of `composition_gain`, on made-up perplexities and on step times at the byte bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from artifact.account import Mode, Setting, step_bytes
from artifact.judge import composition
from artifact.measure.quality_plan import grid
from artifact.profiles import Profile
from artifact.shapes import known_shape
from claims import composition_gain as claim

PROFILE = Profile("paper", "model", "cpu", "float32", None, 2)

Row = dict[str, Any]
SHAPE = known_shape("SmolLM2-135M")
CONTEXT, BLOCKS, STEPS = 4096, 5, 20


def cost(r_p: float, r_kv: float) -> float:
    """Extra nats of a setting: projection costs as in the paper's sweep, the selection nearly nothing."""
    return 0.02 * ((1 - r_p) / 0.3) ** 2 + 0.002 * (1 - r_kv)


def step_ms(r_p: float, r_kv: float) -> float:
    mode = {(0, 0): Mode.DENSE, (1, 0): Mode.PROJECTION, (0, 1): Mode.KV, (1, 1): Mode.BOTH}[r_p < 1, r_kv < 1]
    return step_bytes(SHAPE, Setting(r_p, r_kv, weight_bits=32, kv_bits=32), CONTEXT, mode) / 20e6


def timing(cell: str, block: int, names: list[str], seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    arms = {arm.label: arm for arm in grid()}
    others = [name for name in names if name != "dense"]
    rows = []
    for start in range(0, len(others), claim.GROUP):
        for name in ["dense", *others[start : start + claim.GROUP]]:
            arm = arms[name]
            ms = step_ms(arm.r_p, arm.r_kv) * (1 + 0.01 * rng.standard_normal(STEPS))
            method = "none" if arm.method == "full" else arm.method
            rows.append({
                "cell": f"{cell}-{block}", "block": block, "group": start // claim.GROUP, "r_p": arm.r_p,
                "r_kv": arm.r_kv, "method": method, "ms": ms.tolist(), "origin": "live",
            })  # fmt: skip
    return rows


def honest() -> list[Row]:
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    for window in range(8):
        level = 2.7 + 0.2 * rng.standard_normal()
        for arm in grid():
            nll = level + cost(arm.r_p, arm.r_kv) + 1e-4 * rng.standard_normal()
            rows.append({
                **arm.record(), "cell": "windows-0", "block": 0, "kind": "window", "window": window, "protocol": "p",
                "window_tokens_hash": f"w{window}", "nll": [nll] * 4, "origin": "live", "text": "simulated",
            })  # fmt: skip
    rows += timing("screen", 0, [arm.label for arm in grid()], 2)
    return rows + second_stage(rows)


def second_stage(first: list[Row]) -> list[Row]:
    """Blocks and answers of what the first stage picks."""
    names = composition.to_retime(claim.picked(first))
    rows = [row for block in range(BLOCKS) for row in timing("block", block, names, 10 + block)]
    for arm in grid():
        if arm.label in names:
            for placement in range(20):
                rows.append({
                    **arm.record(), "cell": "retrieval", "block": 0, "kind": "answer", "prompt_id": str(placement),
                    "turn": 1, "outcome": "right",
                })  # fmt: skip
    return rows


def composition_pays(rows: list[Row]) -> None:
    """A composition that runs as slowly as its slower half."""
    for row in rows:
        if "ms" in row and row["cell"] != "screen-0" and row["r_p"] < 1 and row["r_kv"] < 1:
            row["ms"] = [value * 1.9 for value in row["ms"]]


def one_slow_block(rows: list[Row]) -> None:
    """In one block something else takes half of the composition's time."""
    for row in rows:
        if row["cell"] == "block-3" and row["r_p"] < 1 and row["r_kv"] < 1:
            row["ms"] = [value * 1.5 for value in row["ms"]]


def ratio_ignored(rows: list[Row]) -> None:
    """Compositions whose projection branch ran dense."""
    for row in rows:
        if "ms" in row and row["cell"] != "screen-0" and row["r_p"] < 1 and row["r_kv"] < 1:
            row["ms"] = [step_ms(1.0, row["r_kv"])] * STEPS


def composition_does_not_retrieve(rows: list[Row]) -> None:
    """The selected compositions return other archives' codes."""
    for row in rows:
        if row.get("kind") == "answer" and "+" in row["label"]:
            row["outcome"] = "distractor"


def unequal_arms(rows: list[Row]) -> None:
    """One step of a sparse setting is lost."""
    next(row for row in rows if row["cell"] == "block-1" and row["r_p"] < 1)["ms"].pop()


UNEQUAL = unequal_arms
FAULTS = (composition_pays, one_slow_block, ratio_ignored, composition_does_not_retrieve, unequal_arms)
