"""`artifact campaign`: measures within a budget, goes on where it stopped, says by its exit code how far it came."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click.testing
import pytest
from fake_campaign import PROFILE

from artifact import claim as claims
from artifact.claim import Claim, ClaimModule, Predicate
from artifact.records import Cell, Run
from artifact.samples import SampleLog
from artifact.stats import Region
from artifact.verbs import campaign

TESTS = Path(__file__).parent


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A claim of four cells, each of which leaves a line in this file when it really runs."""
    file = tmp_path / "marks"
    predicate = Predicate("p", "a number", "nowhere", Region(0.0, None, "a count"), frozenset({"embedded"}))
    claim = Claim("fake", "fake", "crossover", "nowhere", "nothing", {}, (), (predicate,))

    def measure(run: Run) -> None:
        run.measure([Cell("fake", f"c{i}", "fake_tasks:rows", {"marks": str(file), "name": f"c{i}"}) for i in range(4)])

    module = ClaimModule(claim, measure, lambda rows, profile: [], TESTS / "fake_campaign.py")
    monkeypatch.setattr(claims, "load", lambda name: module)
    monkeypatch.setattr(campaign.profiles, "choose", lambda *_: PROFILE)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")
    return file


def call(tmp_path: Path, *options: str) -> click.testing.Result:
    runner = click.testing.CliRunner()
    return runner.invoke(campaign.command, ["fake", "--run", str(tmp_path / "r"), *options], standalone_mode=False)


def test_a_spent_budget_stops_before_the_next_cell_and_the_same_command_goes_on(
    tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def slow(cell: Cell, profile: Any, run: Run) -> Any:
        now[0] += 40.0
        return real(cell, profile, run)

    real = campaign.campaign.run_local
    monkeypatch.setattr(campaign.campaign, "run_local", slow)
    monkeypatch.setattr(campaign.time, "monotonic", lambda: now[0])
    first = call(tmp_path, "--budget-s", "100")
    assert first.return_value == 3 and marks.read_text().split() == ["c0", "c1"], "a third cell would end at 120 s"
    assert "the budget of 100 s is spent" in first.output and "2 cells measured" in first.output
    second = call(tmp_path, "--budget-s", "100")
    assert second.return_value == 0 and marks.read_text().split() == ["c0", "c1", "c2", "c3"]
    third = call(tmp_path)
    assert third.return_value == 0 and "0 cells measured" in third.output
    assert len(SampleLog(tmp_path / "r" / "samples.jsonl").groups()) == 4


def test_the_machine_is_recorded_once(tmp_path: Path, marks: Path) -> None:
    call(tmp_path)
    system = tmp_path / "r" / "system.json"
    record = json.loads(system.read_text())
    assert record["schema"] == 1 and "commit" in record
    system.write_text(json.dumps(record | {"commit": "kept"}))
    call(tmp_path)
    assert json.loads(system.read_text())["commit"] == "kept"


def test_a_failed_cell_is_exit_code_4(tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(run: Run) -> None:
        run.measure([Cell("fake", "bad", "fake_tasks:leave", {"status": 7})])

    module = claims.load("fake")
    monkeypatch.setattr(claims, "load", lambda name: ClaimModule(module.claim, measure, module.judge, module.source))
    failed = call(tmp_path)
    assert failed.return_value == 4 and "exit status 7" in failed.output
