"""Verdicts and exit codes: what a claim comes to when its cells, its judge or its author fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import claims
from artifact import claim
from artifact.claim import Finding, Predicate, find
from artifact.errors import UserError
from artifact.profiles import Profile
from artifact.records import Run
from artifact.samples import SampleLog
from artifact.stats import Region, Verdict, exact_interval
from artifact.verbs.verify import by_memory, names_of
from artifact.verify import Outcome, derive, exit_code, judge_claim, summarise, verify

PROFILE = Profile("embedded", "none", "cpu", "float32", None, 1)
GOOD = """
from artifact.claim import *
from artifact.claim import find
from artifact.stats import exact_interval
P = Predicate("one", "x is one", "section 1", Region(1.0, 1.0, "arithmetic"), frozenset({"embedded"}), "1")
CLAIM = Claim("NAME", "title", "crossover", "section 1", "nothing", {"embedded": "0.1"}, (), (P,))
def measure(run):
    run.record("NAME", "a", [{"x": VALUE}])
def judge(rows, profile):
    return [find(P, exact_interval(rows[0]["x"]), profile)]
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A folder of claims of our own in place of the real ones; call with a name, and the text of the file."""
    folder = tmp_path / "claims"
    folder.mkdir()
    monkeypatch.setattr(claims, "__path__", [str(folder)])

    def add(name: str, text: str = GOOD, value: str = "1.0") -> None:
        (folder / f"{name}.py").write_text(text.replace("NAME", name).replace("VALUE", value))

    yield add
    for module in [m for m in sys.modules if m.startswith("claims.") and str(folder) in str(sys.modules[m].__file__)]:
        del sys.modules[module]


def outcomes(tmp_path: Path, *names: str, profile: Profile = PROFILE) -> list[Outcome]:
    with Run(tmp_path / "run", profile) as run:
        return verify(run, names)


def test_a_claim_is_measured_judged_and_recorded(write, tmp_path: Path) -> None:
    write("good")
    (outcome,) = outcomes(tmp_path, "good")
    assert (outcome.verdict, exit_code([outcome])) == (Verdict.REPRODUCED, 0)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    finding = results["claims"]["good"]["findings"][0]
    assert finding["verdict"] == "reproduced" and finding["interval"]["point"] == 1.0 and results["schema"] == 1


def test_a_crash_of_one_claim_leaves_the_others_running(write, tmp_path: Path) -> None:
    write("a_crash", GOOD.replace("run.record", "raise ZeroDivisionError('first line\\nsecond')\n    run.record"))
    write("b_broken", "import no_such_module")
    write("c_no_judge", "CLAIM = 3")
    write("d_bad_judge", GOOD.replace("return [find", "return [find(P, exact_interval(rows[7]['x']), profile), find"))
    write("e_good")
    found = outcomes(tmp_path, *claim.names())
    assert [o.verdict for o in found] == [Verdict.ERROR] * 4 + [Verdict.REPRODUCED]
    assert found[0].reason == "ZeroDivisionError: first line" and not found[0].usage
    assert [o.reason.split(":")[0] for o in found[1:4]] == ["ModuleNotFoundError", "TypeError", "IndexError"]
    for name in ("a_crash", "b_broken", "c_no_judge", "d_bad_judge"):
        kept = (tmp_path / "run" / "errors" / f"{name}.txt").read_text()
        assert "Traceback" in kept and str(tmp_path) not in kept
    assert exit_code(found) == 4


def test_the_claims_of_one_paper_and_those_that_nobody_can_place(write) -> None:
    write("a")
    write("b", GOOD.replace('"crossover"', '"sats"'))
    write("c_broken", "import no_such_module")
    assert (names_of("crossover"), names_of("sats")) == (["a", "c_broken"], ["b", "c_broken"])


def test_all_claims_run_largest_first_and_unknown_ones_last(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {
        "a": {"gpu": {"peak_bytes": 9}},
        "b": {"embedded": {"peak_bytes": 5}},
        "d": {"embedded": {"peak_bytes": 7}},
    }
    monkeypatch.setattr("artifact.verbs.list.shipped", lambda: costs)
    assert by_memory(["a", "b", "c", "d"], "embedded") == ["d", "b", "a", "c"]
    assert by_memory(["a", "b", "c", "d"], "gpu") == ["a", "b", "c", "d"]


def test_a_contradicted_value_is_contradicted(write, tmp_path: Path) -> None:
    write("wrong", value="2.0")
    write("good")
    found = outcomes(tmp_path, "good", "wrong")
    assert [o.verdict for o in found] == [Verdict.REPRODUCED, Verdict.CONTRADICTED] and exit_code(found) == 1


def test_an_unmeasured_value_is_inconclusive(write, tmp_path: Path) -> None:
    write("nan", value="float('nan')")
    found = outcomes(tmp_path, "nan")
    assert found[0].verdict is Verdict.INCONCLUSIVE and exit_code(found) == 3
    assert (
        json.loads((tmp_path / "run" / "results.json").read_text())["claims"]["nan"]["findings"][0]["interval"]["low"]
        is None
    )


def test_a_judge_that_keeps_silent_does_not_pass(write, tmp_path: Path) -> None:
    write("silent", GOOD.replace('return [find(P, exact_interval(rows[0]["x"]), profile)]', "return []"))
    found = outcomes(tmp_path, "silent")
    assert found[0].verdict is Verdict.NOT_RUN and exit_code(found) == 3


def test_a_judge_cannot_judge_a_predicate_that_the_claim_does_not_list(write, tmp_path: Path) -> None:
    write(
        "stranger",
        GOOD.replace("[find(P,", "[find(Predicate('easier', '', '', Region(None, None, 'any'), P.asserted_in),"),
    )
    assert "easier" in outcomes(tmp_path, "stranger")[0].reason


def test_a_claim_that_cannot_run_here_says_why(write, tmp_path: Path) -> None:
    write("gpu", GOOD.replace("run.record", "raise NotRun('needs a CUDA GPU')\n    run.record"))
    write("lazy", GOOD.replace("run.record(", "print("))
    found = outcomes(tmp_path, "gpu", "lazy")
    assert [(o.verdict, o.reason) for o in found] == [
        (Verdict.NOT_RUN, "needs a CUDA GPU"),
        (Verdict.NOT_RUN, "no samples"),
    ]
    assert exit_code(found) == 3


def test_a_users_mistake_in_a_claim_is_exit_code_two_unless_something_else_is_broken(write, tmp_path: Path) -> None:
    write(
        "user",
        "from artifact.errors import UserError\n"
        + GOOD.replace("run.record", "raise UserError('bad file')\n    run.record"),
    )
    write("crash", GOOD.replace("run.record", "raise OSError('x')\n    run.record"))
    found = outcomes(tmp_path, "user", "crash")
    assert found[0].reason == "bad file" and found[0].usage
    assert (exit_code(found[:1]), exit_code(found)) == (2, 4)
    assert not (tmp_path / "run" / "errors" / "user.txt").exists()


def test_the_same_rows_get_the_same_verdict_in_a_quick_run(write, tmp_path: Path) -> None:
    """--quick may take fewer samples; it has no way to reach the judge."""
    write("edge", value="1.0000001")
    with Run(tmp_path / "quick", PROFILE, quick=True) as quick, Run(tmp_path / "full", PROFILE) as full:
        assert verify(quick, ["edge"])[0].verdict is verify(full, ["edge"])[0].verdict is Verdict.CONTRADICTED


def test_results_are_derived_again_from_samples_alone(write, tmp_path: Path) -> None:
    write("good")
    write("wrong", value="2.0")
    outcomes(tmp_path, "good", "wrong")
    file = tmp_path / "run" / "results.json"
    before = file.read_bytes()
    edited = json.loads(before)
    edited["claims"]["wrong"]["verdict"] = "reproduced"
    file.write_text(json.dumps(edited))
    derive(tmp_path / "run")
    assert file.read_bytes() == before


def test_a_result_file_of_a_newer_version_is_refused(write, tmp_path: Path) -> None:
    write("good")
    outcomes(tmp_path, "good")
    file = tmp_path / "run" / "results.json"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(UserError, match="update the artifact"):
        derive(tmp_path / "run")


def test_a_failed_cell_makes_the_claim_an_error_although_other_rows_agree(write, tmp_path: Path) -> None:
    write("good")
    with Run(tmp_path / "run", PROFILE) as run:
        verify(run, ["good"])
        group = run.log.groups("good")[0]
        bad = replace(group.cell, key="b")
        run.log.append(
            bad, [], {"status": "error", "error": "counted keep ratio 1.0", "sources": group.closing["sources"]}
        )
    outcome = judge_claim(SampleLog(tmp_path / "run" / "samples.jsonl"), "good", PROFILE)
    assert (outcome.verdict, outcome.reason) == (Verdict.ERROR, "cell b: counted keep ratio 1.0")
    assert outcome.findings[0].verdict is Verdict.REPRODUCED and exit_code([outcome]) == 4


def finding(verdict: Verdict) -> Finding:
    return Finding(Predicate("p", "", "", Region(0, 1, "r"), frozenset()), None, verdict)


@given(st.lists(st.sampled_from(list(Verdict)), max_size=6))
def test_a_claim_is_reproduced_only_when_nothing_asserted_is_otherwise(verdicts: list[Verdict]) -> None:
    summary = summarise([finding(v) for v in verdicts])
    asserted = set(verdicts) - {Verdict.OBSERVED}
    assert (summary is Verdict.REPRODUCED) == (asserted == {Verdict.REPRODUCED})
    assert (summary is Verdict.OBSERVED) == (not asserted)


@given(st.lists(st.tuples(st.sampled_from(list(Verdict)), st.booleans()), max_size=6))
def test_exit_codes_follow_the_documented_precedence(claims_found: list[tuple[Verdict, bool]]) -> None:
    code = exit_code([Outcome("c", verdict, (), usage=usage) for verdict, usage in claims_found])
    verdicts = {verdict for verdict, _ in claims_found}
    if (Verdict.ERROR, False) in claims_found:
        assert code == 4
    elif Verdict.ERROR in verdicts:
        assert code == 2
    elif Verdict.CONTRADICTED in verdicts:
        assert code == 1
    else:
        whole = Verdict.REPRODUCED in verdicts and not verdicts & {Verdict.INCONCLUSIVE, Verdict.NOT_RUN}
        assert code == (0 if whole else 3)


def test_no_claim_executed_is_never_success() -> None:
    assert exit_code([]) == 3 and exit_code([Outcome("c", Verdict.OBSERVED, ())]) == 3


def test_a_predicate_is_judged_only_where_it_is_asserted() -> None:
    predicate = Predicate("p", "", "", Region(0.0, 1.0, "r"), frozenset({"gpu"}))
    gpu = replace(PROFILE, name="gpu")
    assert find(predicate, exact_interval(5.0), PROFILE).verdict is Verdict.OBSERVED
    assert find(predicate, exact_interval(5.0), gpu).verdict is Verdict.CONTRADICTED
    assert find(predicate, None, gpu).verdict is Verdict.NOT_RUN


def test_the_contract_of_a_claim_file_is_checked(write) -> None:
    write("twice", GOOD.replace("(P,))", "(P, P))"))
    write("reasonless", GOOD.replace("arithmetic", " "))
    write("paperless", GOOD.replace('"crossover"', '"other"'))
    for name, message in {"twice": "distinct names", "reasonless": "no reason", "paperless": "is not one of"}.items():
        with pytest.raises(TypeError, match=message):
            claim.load(name)
    with pytest.raises(UserError, match="no claim is called 'nope'"):
        claim.load("nope")
    with pytest.raises(UserError, match="no claim is called"):
        claim.load("../evil")


def test_every_claim_of_the_artifact_keeps_the_contract() -> None:
    assert claim.names()
    for name in claim.names():
        loaded = claim.load(name).claim
        assert loaded.name == name and loaded.minutes and loaded.needs and loaded.place


def test_a_claim_that_waits_for_the_user_leaves_other_claims_complete() -> None:
    done = Outcome("done", Verdict.REPRODUCED, ())
    waiting = Outcome("waiting", Verdict.NOT_RUN, (), "needs a second checkpoint", yours=True)
    assert exit_code([done, waiting]) == 0
    assert exit_code([waiting]) == 3
    assert exit_code([done, Outcome("cut", Verdict.NOT_RUN, (), "no GPU")]) == 3
