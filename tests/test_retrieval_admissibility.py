"""The retrieval claim on made-up outcomes: what it reproduces, and the faults that must turn it away."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest

from artifact.claim import Finding
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import retrieval_admissibility as claim
from tests.faults.retrieval_admissibility import (
    PROFILE,
    Row,
    composition_loses_half,
    dense_answers_nothing,
    honest,
    of,
    perplexity_rejects_selection,
    selection_posing_as_window,
    window_posing_as_selection,
)


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
