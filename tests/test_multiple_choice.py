"""Multiple-choice questions: what a choice scores, the judge of answers, and lm-eval itself on a local task where it
is installed.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from artifact.claim import Finding
from artifact.engine import models
from artifact.engine.prefill import logits, prefill
from artifact.errors import UserError
from artifact.judge import accuracy
from artifact.measure.multiple_choice import asked, likelihood, load, tasks
from artifact.profiles import Profile
from artifact.projection.masked import GateMask
from artifact.shapes import Shape
from artifact.stats import Verdict
from claims import sats_vs_cats as claim
from paper_tables.contexts import sats_table1
from paper_tables.render import TableMissing

SHAPE = Shape("small", 64, 2, 4, 2, 16, 96, 128, 64, False)
ROOT = Path(__file__).parent.parent
PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights() -> models.Weights:
    return models.synthetic(SHAPE, "cpu", torch.float32)


@pytest.mark.parametrize(("before", "choice"), [([5], [6]), ([5], [6, 7, 8]), ([5, 9, 2, 11], [6, 7])])
def test_a_choice_scores_what_its_tokens_have_behind_the_question(
    weights: models.Weights, before: list[int], choice: list[int]
) -> None:
    ids = torch.tensor([*before, *choice])
    scores = logits(weights, prefill(weights, ids).hidden).double().log_softmax(-1)
    places = range(len(before) - 1, len(ids) - 1)
    expected = sum(float(scores[i, ids[i + 1]]) for i in places)
    total, greedy = likelihood(weights, None, before, choice)
    assert total == pytest.approx(expected, abs=1e-4)
    assert greedy == all(int(scores[i].argmax()) == int(ids[i + 1]) for i in places)


def test_a_branch_changes_every_token_but_the_first(weights: models.Weights) -> None:
    nothing = GateMask(torch.full((SHAPE.layers,), math.inf), None)
    everything = GateMask(torch.full((SHAPE.layers,), -1.0), None)
    dense = likelihood(weights, None, [5, 9], [6, 7])[0]
    assert likelihood(weights, everything, [5, 9], [6, 7])[0] == pytest.approx(dense, abs=1e-4)
    assert likelihood(weights, nothing, [5, 9], [6, 7])[0] != pytest.approx(dense, abs=1e-2)
    assert likelihood(weights, nothing, [5], [6])[0] == pytest.approx(likelihood(weights, None, [5], [6])[0])


def test_a_long_question_loses_its_beginning(weights: models.Weights) -> None:
    window = SHAPE.window
    long = [7] * window + [5, 9]
    assert likelihood(weights, None, long, [6]) == likelihood(weights, None, long[-(window - 1) :], [6])


def rows(right: dict[str, list[float]], task: str = "one") -> list[dict[str, Any]]:
    return [
        {"kind": "choice", "label": label, "task": task, "document": i, "right": value, "origin": "live"}
        for label, values in right.items()
        for i, value in enumerate(values)
    ]


def test_tasks_weigh_alike_and_questions_are_paired() -> None:
    asked = rows({"a": [1, 1, 1, 1], "b": [1, 1, 1, 0]}) + rows({"a": [0, 0], "b": [1, 0]}, "two")
    arms = accuracy.arms(asked)
    assert accuracy.average(arms["a"]) == 0.5 and accuracy.average(arms["b"]) == pytest.approx((0.75 + 0.5) / 2)
    apart = accuracy.difference(arms["a"], arms["b"])
    assert apart.point == pytest.approx(0.5 - 0.625) and apart.n == 6
    with pytest.raises(ValueError, match="not asked the same questions"):
        accuracy.arms(asked[:-1])


def found(extra: list[dict[str, Any]]) -> Finding:
    """What the claim says of accuracy, with windows that say nothing."""
    arms = ["dense", "cats30", "sats30", "cats50", "sats50", "sats-inner50"]
    window = {"kind": "window", "nll": [2.0, 3.0], "counted_sparsity": 0.5, "protocol": "p", "window_tokens_hash": "h"}
    windows = [window | {"label": label, "window": i} for label in arms for i in range(6)]
    return claim.judge([*windows, *extra], PROFILE)[-1]


def test_the_claim_says_why_nothing_was_asked_and_judges_what_was() -> None:
    assert "lm-eval was not installed" in found([]).note
    without = [{"kind": "no-choice", "reason": "the data of x are not cached"}]
    assert "not cached" in found(without).note
    with pytest.raises(TableMissing, match="not cached"):
        sats_table1.context(without, {}, {})
    better = rows({"cats50": [0.0, 1.0] * 40, "sats50": [1.0, 1.0] * 40})
    finding = found(better)
    assert finding.interval is not None and finding.interval.low > 0 and finding.verdict is Verdict.OBSERVED
    table = sats_table1.context(better, {}, {})
    shown = {row["label"]: [cell.text for cell in row["cells"]] for row in table["rows"]}
    assert shown == {"cats50": ["50.0", "50.0"], "sats50": ["100.0", "100.0"]} and table["tasks"] == ["one"]


def test_tasks_are_named_or_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARTIFACT_CHOICE_TASKS", "piqa, tests/capitals.yaml")
    assert tasks() == ["piqa", str(Path("tests/capitals.yaml").resolve())]
    monkeypatch.delenv("ARTIFACT_CHOICE_TASKS")
    assert "arc_easy" in tasks()


def harness(monkeypatch: pytest.MonkeyPatch, get_task_dict: Callable[..., dict[str, Any]]) -> None:
    """An lm-eval whose tasks load as told."""
    found = ModuleType("lm_eval.tasks")
    found.TaskManager = lambda include_path: include_path  # type: ignore[attr-defined]
    found.get_task_dict = get_task_dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", found)


def test_unknown_tasks_and_those_that_are_no_choice_are_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(names: list[str], manager: object) -> dict[str, Any]:
        raise KeyError(names[0])

    harness(monkeypatch, unknown)
    with pytest.raises(UserError, match=r"ARTIFACT_CHOICE_TASKS: .*arc_eazy.*lm-eval ls tasks"):
        load(["arc_eazy"])
    harness(monkeypatch, lambda names, manager: {"gsm8k": SimpleNamespace(OUTPUT_TYPE="generate_until")})
    with pytest.raises(UserError, match="gsm8k, which is not multiple-choice"):
        load(["gsm8k"])
    kept = {"piqa": SimpleNamespace(OUTPUT_TYPE="multiple_choice")}
    harness(monkeypatch, lambda names, manager: kept)
    assert load(["piqa"]) == kept


def test_only_data_that_are_not_cached_are_a_reason_to_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(names: list[str], manager: object) -> dict[str, Any]:
        raise ConnectionError("could not reach the hub")

    def broken(names: list[str], manager: object) -> dict[str, Any]:
        raise ValueError("a fault of ours")

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    harness(monkeypatch, offline)
    (row,) = [row for row in asked({"tasks": ["piqa"]}) if "kind" in row]
    assert row["kind"] == "no-choice" and "the data of piqa are not cached" in row["reason"]
    harness(monkeypatch, broken)
    with pytest.raises(ValueError, match="a fault of ours"):
        list(asked({"tasks": ["piqa"]}))


TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""
QUESTIONS = [
    ("What is the capital of France?", ["Paris", "Berlin", "Madrid"], 0),
    ("What is the capital of Germany?", ["Rome", "Berlin", "Oslo"], 1),
    ("What is the capital of Italy?", ["Paris", "London", "Rome"], 2),
    ("What colour is the sky on a clear day?", ["green", "blue"], 1),
]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: make test-eval")
def test_lm_eval_asks_the_embedded_model_a_local_task(tmp_path: Path) -> None:
    from artifact import embedded
    from artifact.measure.masked_plan import Arm, sizes

    data, task = tmp_path / "capitals.jsonl", tmp_path / "capitals.yaml"
    data.write_text("".join(json.dumps({"question": q, "choices": c, "label": i}) + "\n" for q, c, i in QUESTIONS))
    task.write_text(TASK.format(data=data))
    profile = Profile("embedded", str(embedded.path()), "cpu", "float32", None, 2)
    params = {"model": profile.model, "text": None, "device": "cpu", "dtype": "float32"}
    params |= {"sizes": sizes(profile, True).record(), "tasks": [str(task)], "limit": None}
    params["arms"] = [arm.record() for arm in (Arm(), Arm("sats", 0.5))]
    script = "import json, sys; from artifact.measure.multiple_choice import asked; "
    script += "print(json.dumps([row for row in asked(json.load(sys.stdin)) if 'kind' in row]))"
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(params), capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"HF_HOME": str(tmp_path / "hub")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    arms = accuracy.arms(json.loads(done.stdout.splitlines()[-1]))
    assert list(arms) == ["dense", "sats50"] and accuracy.by_task(arms["dense"]) == {"capitals": 1.0}
    assert asdict(accuracy.difference(arms["dense"], arms["sats50"]))["n"] == len(QUESTIONS)
