"""The retrieval claim on made-up outcomes: what it reproduces, and the faults that must turn it away."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from artifact.claim import Finding
from artifact.configuration import Configuration
from artifact.profiles import Profile
from artifact.stats import Verdict
from artifact.verify import summarise
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


def judged(rows: list[Row]) -> dict[str, Finding]:
    return {finding.predicate.name: finding for finding in claim.judge(rows, PROFILE)}


def test_outcomes_as_printed_are_reproduced() -> None:
    found = judged(honest())
    assert summarise(list(found.values())) is Verdict.REPRODUCED
    assert found["selection answers what dense answers"].note == "38 of 38 placements"
    assert found["second turn, stale"].verdict is Verdict.OBSERVED
    assert found["sensitivity of the selection"].interval is not None
    assert found["sensitivity of the selection"].interval.point == 6
    assert set(found) == {predicate.name for predicate in claim.CLAIM.predicates}


def of(rows: list[Row], label: str) -> list[Row]:
    return [row for row in rows if row["kind"] == "answer" and row["label"] == label and not row["tuning"]]


def window_posing_as_selection(rows: list[Row]) -> None:
    outcomes = {row["prompt_id"]: row["outcome"] for row in of(rows, "window30")}
    for row in of(rows, "kv30"):
        row["outcome"] = outcomes.get(row["prompt_id"], row["outcome"])


def selection_posing_as_window(rows: list[Row]) -> None:
    for row in of(rows, "window30"):
        row["outcome"] = "right"


def composition_loses_half(rows: list[Row]) -> None:
    for row in of(rows, "p70+kv30")[::2]:
        row["outcome"] = "wrong"


def dense_answers_nothing(rows: list[Row]) -> None:
    for arm in claim.arms():
        for row in of(rows, arm.label):
            row["outcome"] = "wrong"


def perplexity_rejects_selection(rows: list[Row]) -> None:
    for row in rows:
        if row["kind"] == "window" and row["label"] == "kv30":
            row["nll"] = [value + 0.5 for value in row["nll"]]


@pytest.mark.parametrize(
    ("fault", "predicate"),
    [
        (window_posing_as_selection, "selection answers what dense answers"),
        (selection_posing_as_window, "window outside its region"),
        (composition_loses_half, "composition keeps the answers"),
        (dense_answers_nothing, "dense answers"),
        (perplexity_rejects_selection, "perplexity does not favour the window's failure"),
    ],
)
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None], predicate: str) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    found = judged(rows)
    assert found[predicate].verdict in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)
    assert summarise(list(found.values())) is not Verdict.REPRODUCED


def test_a_distractor_is_no_hit() -> None:
    rows = honest()
    for row in of(rows, "kv30"):
        row["outcome"] = "distractor" if row["outcome"] == "right" else "right"
    assert judged(rows)["selection answers what dense answers"].verdict is Verdict.CONTRADICTED


def test_few_placements_do_not_suffice() -> None:
    rows = [row for row in honest() if row["kind"] != "answer" or row["tuning"] or int(row["prompt_id"][2:]) < 12]
    finding = judged(rows)["selection answers what dense answers"]
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.interval is not None and math.isclose(finding.interval.low, 0.05 ** (1 / 11))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.remove(of(rows, "kv30")[0]), "unequal"),
        (lambda rows: of(rows, "kv30")[0].update(prompt_id="1-99"), "different prompts"),
        (lambda rows: of(rows, "kv30")[0].update(outcome="truncated"), "cut off"),
        (lambda rows: [row.update(source="evaluation") for row in rows if row.get("tuning")], "tuned on the text"),
        (lambda rows: rows.remove(next(r for r in rows if r["kind"] == "window" and r["label"] == "kv30")), "windows"),
    ],
)
def test_unequal_or_tuned_arms_are_errors(change: Callable[[list[Row]], object], message: str) -> None:
    rows = honest()
    change(rows)
    with pytest.raises(ValueError, match=message):
        claim.judge(rows, PROFILE)
