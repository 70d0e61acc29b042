"""`artifact quality`: what it prints, and the sentences for input that makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from artifact import embedded
from artifact.cli import main
from artifact.errors import UserError
from artifact.measure import quality_cells
from artifact.profiles import Profile
from artifact.tasks import longbench
from artifact.verbs import quality


def rows(params: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"progress": 0.5, "doing": "x"}]
    for number, arm in enumerate(params["arms"]):
        for window in range(params.get("windows", 0)):
            found.append({
                **arm, "kind": "window", "window": window, "protocol": "p", "nll": [2.0 + 0.1 * number] * 2,
                "window_tokens_hash": f"w{window}", "counted_r_p": arm["r_p"], "counted_r_kv": arm["r_kv"],
                "text": "a text",
            })  # fmt: skip
        for entry in params.get("prompts", []):
            outcome = "right" if number == 0 else "distractor"
            found += [{**arm, "kind": "answer", "test": entry["test"], "outcome": outcome}] * entry["placements"]
    return found


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_cells, "scored", rows)
    monkeypatch.setattr(quality_cells, "answered", rows)
    monkeypatch.setattr("artifact.profiles.check_model", lambda profile: None)


def test_the_card_and_the_last_line_agree() -> None:
    result = CliRunner().invoke(quality.command, ["--mode", "kv", "--windows", "3"], standalone_mode=False)
    assert result.exception is None
    lines = result.output.splitlines()
    found = json.loads(lines[-1])
    assert found["configuration"]["label"] == "kv30"
    assert found["increase"]["windows"] == 3
    assert f"{found['increase']['point']:+.2%}" in lines[1]
    assert "multikey, kv30: 0 of 4 right, 4 distractor" in lines
    assert found["retrieval"]["passkey"]["dense"] == {"right": 4}


def test_dense_alone_and_no_retrieval() -> None:
    result = CliRunner().invoke(
        quality.command, ["--mode", "dense", "--placements", "0", "--json"], standalone_mode=False
    )
    found = json.loads(result.output)
    assert found["increase"]["point"] == 0 and found["retrieval"] == {}


@pytest.mark.parametrize("arguments", [["--r-p", "0"], ["--r-kv", "1.5"], ["--mode", "kv", "--r-kv", "1"]])
def test_impossible_ratios_are_one_sentence(arguments: list[str]) -> None:
    result = CliRunner().invoke(quality.command, arguments, standalone_mode=False)
    assert isinstance(result.exception, UserError)


def test_unused_ratios_do_not_reach_the_configuration() -> None:
    assert quality.configuration("kv", 0.5, 0.3).label == "kv30"
    assert quality.configuration("projection", 0.5, 0.3).label == "p50"
    assert quality.configuration("window", 0.5, 0.3).label == "window30"
    assert quality.configuration("both", 0.5, 0.3).label == "p50+kv30"


def test_a_missing_model_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "--model", "/nowhere/model.gguf"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_longbench_task_is_answered_by_the_embedded_model_from_a_local_copy(tmp_path: Path) -> None:
    record = {"input": "What is the capital of France?", "context": "Paris is the capital of France. " * 20}
    line = json.dumps(record | {"answers": ["Paris"], "all_classes": None})
    (tmp_path / "hotpotqa.jsonl").write_text(line + "\n" + line + "\n", encoding="utf-8")
    profile = Profile("embedded", str(embedded.path()), "cpu", "float32", None, 2)
    arms = quality._arms("kv", 0.7, 0.5)
    found = quality.long_tasks(profile, arms, "hotpotqa", tmp_path, 1)
    assert (found["task"], found["records"]) == ("hotpotqa", 1)
    assert list(found["score"]) == [arm.label for arm in arms] and found["score"]["dense"] > 0


@pytest.mark.parametrize(
    ("task", "said"),
    [("hotpot", "no LongBench task is called 'hotpot'"), ("qasper", r"qasper\.jsonl cannot be read")],
)
def test_a_longbench_task_that_cannot_be_had_costs_no_scoring(
    task: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "evaluate", lambda *_: pytest.fail("windows were scored first"))
    with pytest.raises(UserError, match=said):
        quality.command(["--longbench", task, "--longbench-folder", str(tmp_path)], standalone_mode=False)


def test_the_card_prints_longbench_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    loaded: list[Any] = []
    monkeypatch.setattr(longbench, "load", lambda *task: loaded.append(task))

    def long_tasks(profile: Any, arms: Any, *rest: Any) -> dict[str, Any]:
        asked.append(rest)
        return {"task": "hotpotqa", "records": 3, "score": {"dense": 0.25, "kv30-snapkv": 0.125}}

    monkeypatch.setattr(quality, "long_tasks", long_tasks)
    options = ["--mode", "kv", "--longbench", "hotpotqa", "--longbench-folder", "data", "--longbench-records", "3"]
    result = CliRunner().invoke(quality.command, options, standalone_mode=False)
    assert asked == [("hotpotqa", Path("data"), 3)] and loaded == [("hotpotqa", Path("data"), 1)]
    assert "LongBench hotpotqa, dense: 25.0 over 3 records" in result.output
    assert json.loads(result.output.splitlines()[-1])["longbench"]["records"] == 3
    assert "LongBench" not in CliRunner().invoke(quality.command, ["--mode", "kv"], standalone_mode=False).output
