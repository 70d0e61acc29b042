"""The transfer claim: not run without a second checkpoint, judged per bound with one, and its seeded faults."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from artifact.account import Mode, Setting, step_bytes
from artifact.claim import NotRun
from artifact.profiles import Profile
from artifact.records import Run
from artifact.shapes import known_shape
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import transfer as claim

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
SHAPES = {"first": known_shape("Llama-3.1-8B"), "second": known_shape("Mistral-7B-v0.3")}
Row = dict[str, Any]


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


def test_two_checkpoints_of_one_size_gain_alike() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert summarise(findings) is Verdict.REPRODUCED
    assert findings[1].interval is not None and findings[1].interval.point == pytest.approx(1.0, abs=0.02)


def second_ran_dense(rows: list[Row]) -> None:
    for row in rows:
        if str(row["cell"]).startswith("second") and row["mode"] == "projection":
            row["ms"] = next(r["ms"] for r in rows if r["cell"] == row["cell"] and r["mode"] == "dense")


def second_gains_half(rows: list[Row]) -> None:
    for row in rows:
        if str(row["cell"]).startswith("second") and row["mode"] == "projection":
            row["ms"] = [value * 1.3 for value in row["ms"]]


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
