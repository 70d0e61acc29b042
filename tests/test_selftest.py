"""`artifact selftest`: every claim has faults, each is noticed, and a fault that is not fails the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from artifact import claim as claims
from artifact.cli import main
from artifact.stats import Verdict
from artifact.verbs import selftest
from tests import faults
from tests.faults import _engine

SUITES = {suite.claim: suite for suite in faults.suites()}


def test_every_claim_has_at_least_two_seeded_faults_and_each_says_what_it_is() -> None:
    assert set(SUITES) == set(claims.names())
    for suite in SUITES.values():
        assert len(suite.faults) >= selftest.LEAST
        assert all(fault.__doc__ for fault in suite.faults), suite.claim
        assert suite.unequal is None or suite.unequal in suite.faults


@pytest.mark.parametrize("name", sorted(SUITES))
def test_honest_rows_are_reproduced_and_no_fault_is(name: str) -> None:
    found = faults.trials(SUITES[name])
    assert [trial for trial in found if not trial.as_it_must_be] == []
    assert found[0].verdict is Verdict.REPRODUCED and not found[0].fault


def test_every_defect_of_a_decoding_cell_ends_it_as_an_error() -> None:
    found = _engine.trials()
    assert found[0].verdict is Verdict.REPRODUCED
    assert [trial for trial in found if not trial.as_it_must_be] == []
    assert all(trial.noticed for trial in found[1:])


def test_the_command_prints_a_table_and_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "byte_account", "transfer"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert summary["faults"] == len(SUITES["byte_account"].faults) + len(SUITES["transfer"].faults)
    assert summary["unnoticed"] == summary["missing"] == summary["not_reproduced"] == []
    assert any("K stands for 1,000 tokens" in line and "contradicted" in line for line in table)


FAULT = '''"""Faults of a claim."""
from claims import byte_account
from .%s import PROFILE, honest

def harmless(rows):
    """Nothing changes"""

def lost(rows):
    """All rows are lost"""
    rows.clear()

FAULTS = (%s)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the registry with the files of one claim to change."""
    source = Path(faults.__file__).parent
    for name in ("__init__.py", "byte_account.py"):
        (tmp_path / name).write_text((source / name).read_text())
    (tmp_path / "_kept.py").write_text((source / "byte_account.py").read_text())
    real = selftest.load
    monkeypatch.setattr(selftest, "load", lambda: real(tmp_path))
    return tmp_path


def test_a_fault_that_stays_reproduced_fails_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "byte_account.py").write_text(FAULT % ("_kept", "harmless, harmless"))
    assert main(["selftest", "byte_account", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["unnoticed"] == ["byte_account: Nothing changes"] * 2


def test_a_claim_without_two_faults_fails_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "byte_account.py").write_text(FAULT % ("_kept", "lost,"))
    assert main(["selftest", "byte_account", "transfer", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == ["transfer", "byte_account"]


def test_rows_that_are_not_reproduced_without_a_fault_are_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = (folder / "_kept.py").read_text().replace("for check in claim.CHECKS]", "for check in claim.CHECKS[:3]]")
    (folder / "byte_account.py").write_text(broken)
    assert main(["selftest", "byte_account", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["not_reproduced"] == ["byte_account"]


def test_an_installation_without_the_tests_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = selftest.load
    monkeypatch.setattr(selftest, "load", lambda: real(tmp_path))
    assert main(["selftest"]) == 2
    assert "needs the folder tests/faults of a checkout" in capsys.readouterr().err
