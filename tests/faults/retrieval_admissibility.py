"""Seeded faults of `retrieval_admissibility`, on outcomes as the paper describes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from artifact.measure.configuration import Configuration
from artifact.profiles import Profile
from claims import retrieval_admissibility as claim

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)

Row = dict[str, Any]
PLACEMENTS, INSIDE, WINDOWS = 40, 12, 8


def answer(arm: Configuration, placement: int, outcome: str, turn: int = 1, selection: str = "own") -> Row:
    window = placement >= PLACEMENTS - INSIDE if arm.method == "window" else None
    test = "multikey" if placement % 2 else "passkey"
    return {
        **arm.record(), "kind": "answer", "test": test, "prompt_id": f"{turn}-{placement}", "turn": turn,
        "selection": selection, "outcome": outcome, "in_window": window, "tuning": False, "source": "evaluation",
        "asked_tokens": 2048,
    }  # fmt: skip


def honest() -> list[Row]:
    """Rows as the paper describes them: the window answers its region, every other arm what dense answers."""
    rows = []
    for arm in claim.arms():
        for placement in range(PLACEMENTS):
            outcome = "distractor" if placement in (3, 17) else "right"
            if arm.method == "window" and placement < PLACEMENTS - INSIDE:
                outcome = "distractor" if placement % 2 else "wrong"
            rows.append(answer(arm, placement, outcome))
    dense, _, selection = claim.arms()[:3]
    for placement in range(8):
        rows += [answer(arm, placement, "right", 2, "stale") for arm in (dense, selection)]
        rows.append(answer(selection, placement, "right", 2, "rescored"))
    for arm in claim.variants():
        for placement in range(6):
            tuned = answer(arm, placement, "right" if arm.snapkv.width > 7 else "wrong")
            rows.append(tuned | {"tuning": True, "source": "calibration", "prompt_id": f"tuning-{placement}"})
    rng = np.random.default_rng(0)
    for window in range(WINDOWS):
        level = 2.7 + 0.2 * rng.standard_normal()
        for arm in claim.arms():
            cost = 0.1 * (1 - arm.r_p) + 0.08 * (arm.method != "full") + 0.01 * rng.standard_normal()
            rows.append({
                **arm.record(), "kind": "window", "window": window, "protocol": "p", "window_tokens_hash": f"w{window}",
                "nll": [level + cost] * 4,
            })  # fmt: skip
    return rows


def of(rows: list[Row], label: str) -> list[Row]:
    return [row for row in rows if row["kind"] == "answer" and row["label"] == label and not row["tuning"]]


def window_posing_as_selection(rows: list[Row]) -> None:
    """A wrong mask: the selection reads the window's entries."""
    outcomes = {row["prompt_id"]: row["outcome"] for row in of(rows, "window30")}
    for row in of(rows, "kv30"):
        row["outcome"] = outcomes.get(row["prompt_id"], row["outcome"])


def selection_posing_as_window(rows: list[Row]) -> None:
    """The window answers what it cannot have read: it is the selection, or dense."""
    for row in of(rows, "window30"):
        row["outcome"] = "right"


def composition_loses_half(rows: list[Row]) -> None:
    """The cache of one arm is used by the next: every other composed answer is lost."""
    for row in of(rows, "p70+kv30")[::2]:
        row["outcome"] = "wrong"


def dense_answers_nothing(rows: list[Row]) -> None:
    """A wrong rotary position: even dense decoding answers nothing, and all arms agree."""
    for arm in claim.arms():
        for row in of(rows, arm.label):
            row["outcome"] = "wrong"


def perplexity_rejects_selection(rows: list[Row]) -> None:
    """The selection costs perplexity, the window does not."""
    for row in rows:
        if row["kind"] == "window" and row["label"] == "kv30":
            row["nll"] = [value + 0.5 for value in row["nll"]]


def tuned_on_the_evaluation(rows: list[Row]) -> None:
    """The selection's parameters were chosen on the evaluation text."""
    for row in rows:
        if row.get("tuning"):
            row["source"] = "evaluation"


def unequal_arms(rows: list[Row]) -> None:
    """One prompt is lost from the selection's arm."""
    rows.remove(of(rows, "kv30")[0])


UNEQUAL = unequal_arms
FAULTS = (
    window_posing_as_selection,
    selection_posing_as_window,
    composition_loses_half,
    dense_answers_nothing,
    perplexity_rejects_selection,
    tuned_on_the_evaluation,
    unequal_arms,
)
