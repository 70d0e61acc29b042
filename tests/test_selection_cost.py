"""The selection-cost claim on made-up times: what it reproduces, and its seeded faults."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from artifact.stats import Verdict
from artifact.verify import summarise
from claims import selection_cost as claim
from tests.faults.selection_cost import (
    PROFILE,
    Row,
    honest,
    nothing_saved,
    one_length_slow,
    slow_selection,
    unequal_arms,
)


def verdicts(rows: list[Row]) -> list[Verdict]:
    return [finding.verdict for finding in claim.judge(rows, PROFILE)]


def test_repaid_tokens_by_hand() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert findings[0].interval is not None
    assert findings[0].interval.point == pytest.approx(50 * 1.015)
    assert summarise(findings) is Verdict.REPRODUCED
    assert findings[1].verdict is Verdict.OBSERVED


@pytest.mark.parametrize("fault", [slow_selection, nothing_saved, one_length_slow])
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None]) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    assert verdicts(rows)[0] in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)


def test_unequal_arms_are_errors() -> None:
    rows = honest()
    unequal_arms(rows)
    with pytest.raises(ValueError, match="samples"):
        claim.judge(rows, PROFILE)
    lost = honest()
    lost.remove(next(row for row in lost if row["kind"] == "selection"))
    with pytest.raises(ValueError, match="unequal"):
        claim.judge(lost, PROFILE)
