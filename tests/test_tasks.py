"""Variable tracking in token space, and LongBench's format, prompts and metrics on a tiny local copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_retrieval import Letters, writer

from artifact.errors import UserError
from artifact.tasks import longbench
from artifact.tasks.longbench import Record
from artifact.tasks.variable_tracking import prompts


@pytest.mark.parametrize("ask", ["names", "value"])
def test_chains_are_written_in_order_and_asked_for_by_their_value_or_last_name(ask: str) -> None:
    for prompt in prompts(writer(), 1200, 5, hops=3, chains=2, ask=ask):
        text = Letters().decode(prompt.tokens.tolist())
        assert len(text) == 1200 and len(prompt.names) == 4 and len(prompt.others) == 4
        places = [text.index(f" VAR {prompt.names[0]} = {prompt.value}.")]
        for before, after in zip(prompt.names, prompt.names[1:], strict=False):
            places.append(text.index(f" VAR {after} = VAR {before}."))
        assert places == sorted(places)
        end = f"assigned the value {prompt.value} are" if ask == "names" else f"value of VAR {prompt.names[-1]} is"
        assert text.endswith(end)
        assert text.count(" VAR ") == 8 + 6 + (2 if ask == "value" else 0)


def test_prompts_are_reproducible_and_tags_draw_others() -> None:
    first, again = prompts(writer(), 900, 3), prompts(writer(), 900, 3)
    other = prompts(writer(), 900, 3, tag="reference")
    assert [p.id for p in first] == [p.id for p in again] and not {p.id for p in first} & {p.id for p in other}
    assert not {p.value for p in first} & {p.value for p in other}
    with pytest.raises(UserError, match="a tracking prompt of 300 tokens has no room for text"):
        prompts(writer(), 300, 1)
    with pytest.raises(UserError, match="names or value, not 'colour'"):
        prompts(writer(), 900, 1, ask="colour")


def test_fault_30_names_and_values_are_words_of_their_own() -> None:
    named, valued = prompts(writer(), 900, 1)[0], prompts(writer(), 900, 1, ask="value")[0]
    assert named.score(" " + ", ".join(named.names) + ".") == 1.0
    assert named.score(f" {named.names[0]} and {named.names[1]}X") == pytest.approx(1 / 3)
    assert valued.score(f" {valued.value}.") == 1.0
    assert valued.score(f" {valued.value}3") == valued.score(f" 1{valued.value}") == valued.score("") == 0.0


ROWS = [
    {"input": "Who sailed?", "context": "A ship sailed.", "answers": ["The ship", "a boat"], "all_classes": None},
    {
        "input": "What is it?",
        "context": "Type: Abbreviation",
        "answers": ["Date"],
        "all_classes": ["Date", "Da", "Place"],
    },
]


def folder(path: Path, task: str, lines: list[str]) -> Path:
    (path / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_local_copy_is_read_prompted_and_scored(tmp_path: Path) -> None:
    place = folder(tmp_path, "hotpotqa", [json.dumps(ROWS[0])])
    (record,) = longbench.load("hotpotqa", place)
    ids = longbench.encode(Letters(), record, 2000)  # type: ignore[arg-type]
    text = Letters().decode(ids.tolist())
    assert text.endswith("Question: Who sailed?\nAnswer:") and "\nA ship sailed.\n" in text
    assert longbench.score(record, " the Ship!") == 1.0
    assert longbench.score(record, "a big ship") == pytest.approx(2 / 3)


def test_long_prompts_are_cut_in_the_middle(tmp_path: Path) -> None:
    record = Record("hotpotqa", "Q?", "x" * 5000, ("a",), ())
    whole = longbench.encode(Letters(), record, 10000)  # type: ignore[arg-type]
    cut = longbench.encode(Letters(), record, 1032)  # type: ignore[arg-type]
    assert len(cut) == 1000
    assert torch.equal(cut[:500], whole[:500]) and torch.equal(cut[500:], whole[-500:])
    with pytest.raises(UserError, match="a window of 33 tokens has no room for an answer of 32"):
        longbench.encode(Letters(), record, 33)  # type: ignore[arg-type]


def test_every_task_has_a_prompt_with_its_context_and_a_metric() -> None:
    assert len(longbench.tasks()) == 16
    for spec in longbench.tasks().values():
        assert spec["prompt"].count("{context}") == 1 and spec["metric"] in longbench.METRICS and spec["tokens"] > 0


def test_metrics_follow_their_definitions() -> None:
    assert longbench.rouge_l("the cat sat down", "the cat lay down") == pytest.approx(6 / 8)
    assert longbench.rouge_l("", "x") == 0.0
    assert longbench.numbers("Paragraph 3, not 13", "Paragraph 3") == 0.5
    assert longbench.code("# note\n  return x\nmore", "  return y") == pytest.approx(0.9)
    record = Record("trec", "", "", ("Date",), ("Date", "Da", "Place"))
    assert longbench.score(record, "\nDate\nPlace") == 1.0
    assert longbench.score(record, "Date or Place") == 0.5 and longbench.score(record, "Place") == 0.0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{broken", "is not JSON lines"),
        ("[]", "record 0 of trec lacks one of"),
        (json.dumps({**ROWS[1], "answers": "Date"}), "has no list of answers"),
        (json.dumps({**ROWS[1], "answers": []}), "has no list of answers"),
    ],
)
def test_a_damaged_copy_is_a_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        longbench.load("trec", folder(tmp_path, "trec", [line]))


def test_what_is_not_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"qasper\.jsonl cannot be read"):
        longbench.load("qasper", tmp_path)
    with pytest.raises(UserError, match="no LongBench task is called 'x'"):
        longbench.load("x", tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(UserError, match=r"neither cached nor reachable \(no route to the hub\)"):
        longbench.load("qasper")
