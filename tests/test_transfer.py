"""The transfer claim: not run without a second checkpoint, judged per bound with one, and its seeded faults."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from artifact.claim import NotRun
from artifact.records import Run
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import transfer as claim
from tests.faults.transfer import PROFILE, Row, honest, second_gains_half, second_ran_dense


def test_two_checkpoints_of_one_size_gain_alike() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert summarise(findings) is Verdict.REPRODUCED
    assert findings[1].interval is not None and findings[1].interval.point == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("fault", [second_ran_dense, second_gains_half])
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None]) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    assert summarise(claim.judge(rows, PROFILE)) in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)


def test_lost_blocks_of_one_checkpoint_are_an_error() -> None:
    rows = [row for row in honest() if row["cell"] != "second-3"]
    with pytest.raises(ValueError, match="unequal"):
        claim.judge(rows, PROFILE)


def test_without_a_second_checkpoint_it_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(claim.VARIABLE, raising=False)
    with Run(tmp_path / "run", PROFILE) as run, pytest.raises(NotRun, match=f"{claim.VARIABLE}=PATH artifact verify"):
        claim.measure(run)
    monkeypatch.setenv(claim.VARIABLE, str(tmp_path / "absent"))
    with Run(tmp_path / "run", PROFILE) as run, pytest.raises(NotRun, match="does not exist"):
        claim.measure(run)
    assert {finding.verdict for finding in claim.judge([], PROFILE)} == {Verdict.NOT_RUN}
