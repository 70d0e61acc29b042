"""Prompts in token space and grading; answers of a tiny model do not depend on what was asked before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_fixture import saved

from artifact.engine import models
from artifact.engine.decoder import Decoder
from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.kv.snapkv import SnapKV
from artifact.measure import answers
from artifact.measure.configuration import Configuration, bind
from artifact.measure.retrieval import Needle, Prompt, Writer, answer_tokens, check, grade
from artifact.measure.workbench import Workbench
from artifact.projection import teal
from artifact.text import Text

SNAPKV = SnapKV(rows=8, width=5)


class Letters:
    """A tokenizer with one token per character."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return SimpleNamespace(input_ids=start + [ord(letter) for letter in text])

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids)


STORY = Text("story", "0" * 64, "The sea was calm. A ship sailed by the old town. " * 60, "test")


def writer(bos: int | None = None, seed: int = 0, longest: int = 1500) -> Writer:
    return Writer(Letters(bos), STORY, longest, seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("bos", [None, 1])
def test_needles_lie_where_they_say_and_prompts_have_their_length(bos: int | None) -> None:
    for prompt in [*writer(bos).passkey(600, 5), *writer(bos).multikey(900, 8)]:
        ids = prompt.tokens.tolist()
        text = Letters().decode(ids)
        assert ids.count(1) == (1 if bos else 0)
        assert abs(len(ids) - (600 if prompt.test == "passkey" else 900)) <= 2
        for needle in prompt.needles:
            code = text[needle.start : needle.stop]
            assert code[0] == " " and len(code) == 6 and code[1:].isdigit()
            assert text.count(code.strip()) == 1
            before = text[: needle.start]
            assert before.endswith(f"code of the {needle.name} archive is" if needle.name else "The pass key is")
        asked = prompt.needle.name
        assert text.endswith(f"{asked} archive is" if asked else "The pass key is")


def test_placements_cover_the_prompt_and_every_archive_is_asked_for() -> None:
    depths = [prompt.depth for prompt in writer().passkey(1000, 8)]
    assert depths == sorted(depths) and depths[0] < 0.15 and depths[-1] > 0.8
    keys = writer().multikey(1000, 8)
    assert [prompt.asked for prompt in keys] == [0, 1, 2, 3] * 2
    assert len({prompt.depth for prompt in keys}) == 8
    assert len({prompt.haystack for prompt in keys}) == 2
    for prompt in keys[:4]:
        assert torch.equal(prompt.tokens[: prompt.shared], keys[0].tokens[: keys[0].shared])


def test_the_golden_prompt() -> None:
    prompt = writer().passkey(240, 1)[0]
    code = Letters().decode(list(prompt.needle.code))
    assert Letters().decode(prompt.tokens.tolist()) == (
        "The sea was calm. A ship sailed by the old town. The sea was calm. A ship sailed by the old town."
        f" The pass key is{code}. Remember it."
        " The sea was calm. A ship sailed by the old town. The sea was calm."
        "\n\nWhat was the pass key? The pass key is"
    )


def test_prompts_are_fixed_by_their_seed() -> None:
    a, b, c = (w.multikey(800, 4) for w in (writer(), writer(), writer(seed=1)))
    assert [p.id for p in a] == [p.id for p in b]
    assert not {p.id for p in a} & {p.id for p in c}
    assert len({p.id for p in a}) == 4


def test_second_turn_asks_for_another_archive_after_the_right_answer() -> None:
    prompt = writer().multikey(800, 4)[1]
    turn, second = writer().second_turn(prompt)
    text = Letters().decode(turn.tolist())
    assert text.startswith(Letters().decode(list(prompt.needle.code)) + ".")
    assert second.needle.name != prompt.needle.name
    assert text.endswith(f"The access code of the {second.needle.name} archive is")
    assert torch.equal(second.tokens, torch.cat((prompt.tokens, turn)))


@pytest.mark.parametrize(
    ("generated", "outcome"),
    [
        (" 4821.", "right"),
        (" 4821 ", "right"),
        (" 48213", "wrong"),  # the code is part of a longer number
        (" 4999.", "distractor"),
        (" 49990", "wrong"),
        ("x4821.", "wrong"),
        (" 482", "truncated"),
        ("", "truncated"),
    ],
)
def test_grading(generated: str, outcome: str) -> None:
    codes = [tuple(map(ord, " 4821")), tuple(map(ord, " 4999"))]
    needles = (Needle("a", codes[0], 0), Needle("b", codes[1], 9))
    prompt = Prompt("multikey", torch.zeros(1), needles, 0, "", 0)
    assert answer_tokens(prompt) == 6
    assert grade(prompt, list(map(ord, generated)), Letters()) == outcome  # type: ignore[arg-type]


def test_a_needle_elsewhere_twice_or_a_second_bos_is_an_error() -> None:
    prompt = writer(1).passkey(400, 1)[0]
    start, width = prompt.needle.start, len(prompt.needle.code)
    moved = Prompt("passkey", prompt.tokens.roll(1), prompt.needles, 0, "", 0)
    with pytest.raises(ValueError, match="is not at token"):
        check(moved, [1])
    twice = prompt.tokens.clone()
    twice[10 : 10 + width] = prompt.tokens[start : start + width]
    with pytest.raises(ValueError, match="occurs 2 times"):
        check(Prompt("passkey", twice, prompt.needles, 0, "", 0), [1])
    doubled = prompt.tokens.clone()
    doubled[1] = 1
    with pytest.raises(ValueError, match="BOS"):
        check(Prompt("passkey", doubled, prompt.needles, 0, "", 0), [1])


def test_impossible_prompts_are_refused() -> None:
    with pytest.raises(UserError, match="no room"):
        writer().multikey(150, 4)
    with pytest.raises(UserError, match="multiple of 4"):
        writer().multikey(900, 6)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    _, path = saved("llama", tmp_path_factory.mktemp("models"))
    weights = models.load(str(path))
    ids = torch.tensor(Letters()(STORY.text[:400]).input_ids)
    folder = tmp_path_factory.mktemp("data") / "prepared" / "x"
    folder.mkdir(parents=True)
    return Workbench(weights, Letters(), teal.calibrate(weights, ids), ids, STORY, STORY, folder)  # type: ignore[arg-type]


ARMS = [
    Configuration(),
    Configuration(r_kv=0.3, method="snapkv", snapkv=SNAPKV),
    Configuration(r_kv=0.3, method="window"),
    Configuration(0.6, 0.3, "snapkv", SNAPKV),
]


def test_answers_are_those_of_a_fresh_prefill_and_fork(bench: Workbench) -> None:
    """Sharing a haystack, rolling back and the order of arms change nothing: each answer stands alone."""
    source = writer(longest=300)
    prompts = [*source.passkey(300, 3), *source.multikey(460, 4)]
    rows = list(answers.ask(bench, prompts, ARMS))
    assert len(rows) == len(prompts) * len(ARMS)
    stored = {(row["prompt_id"], row["label"]): row for row in rows}
    for prompt in prompts:
        count = len(prompt.tokens) - 1
        filled = prefill(bench.weights, prompt.tokens[:count], None, (count,), 64)
        for arm in ARMS:
            steps = answer_tokens(prompt)
            cache = filled.cache.fork(count, count + steps)
            branch = bind(arm, bench.weights, bench.calibration, cache, filled.queries[count], steps)
            buffer = torch.cat((prompt.tokens, torch.zeros(steps, dtype=torch.int64)))
            decoder = Decoder(bench.weights, cache, buffer, branch.thresholds, branch.packed, greedy=True)
            for _ in range(steps):
                decoder.step()
            row = stored[prompt.id, arm.label]
            assert row["generated"] == buffer[count + 1 : count + 1 + steps].tolist()
            assert row["prompt_tokens"] == count + 1


def test_the_second_turn_has_its_stale_and_its_rescored_selection(bench: Workbench) -> None:
    source = writer(longest=300)
    prompts = source.multikey(410, 4)
    rows = [row for row in answers.ask(bench, prompts, ARMS, source) if row["turn"] == 2]
    kinds = [(row["label"], row["selection"]) for row in rows[:3]]
    assert kinds == [("dense", "stale"), (ARMS[1].label, "stale"), (ARMS[1].label, "rescored")]
    assert len(rows) == 3 * len(prompts)
    assert all(row["prompt_tokens"] > 410 for row in rows)


def test_an_answer_that_the_window_cuts_off_is_truncated(bench: Workbench, tmp_path: Path) -> None:
    source = writer(longest=512)
    prompt = source.passkey(512 - 3, 1)[0]
    rows = list(answers.ask(bench, [prompt], ARMS[:2]))
    assert [row["outcome"] for row in rows] == ["truncated", "truncated"]


def test_the_window_says_which_needles_it_holds(bench: Workbench) -> None:
    rows = list(answers.ask(bench, writer(longest=400).passkey(400, 4), [ARMS[2]]))
    assert [row["in_window"] for row in rows] == [False, False, False, True]


def test_a_stale_second_turn_is_what_decode_steps_give(bench: Workbench) -> None:
    """The turn is read in one pass; decoding it token by token on the same packed cache answers the same."""
    source = writer(longest=300)
    prompt = source.multikey(410, 4)[0]
    arm = ARMS[1]
    row = next(
        row for row in answers.ask(bench, [prompt], [arm], source) if (row["turn"], row["selection"]) == (2, "stale")
    )
    turn, second = source.second_turn(prompt)
    count, steps = len(prompt.tokens) - 1, answer_tokens(second)
    filled = prefill(bench.weights, prompt.tokens[:count], None, (count,), 64)
    cache = filled.cache.fork(count, count + 200)
    branch = bind(arm, bench.weights, None, cache, filled.queries[count], 150)
    buffer = torch.cat((second.tokens, torch.zeros(steps, dtype=torch.int64)))
    given = Decoder(bench.weights, cache, buffer, None, branch.packed)
    for _ in range(len(turn)):
        given.step()
    decoder = Decoder(bench.weights, cache, buffer, None, branch.packed, greedy=True)
    for _ in range(steps):
        decoder.step()
    assert row["generated"] == buffer[len(second.tokens) : len(second.tokens) + steps].tolist()
