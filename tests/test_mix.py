"""Request mixes: what a file says is what is drawn, on every machine alike, and damaged files are one sentence."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from artifact.deploy.mix import Lengths, from_record, load
from artifact.errors import UserError


def test_the_shipped_mix_follows_its_stated_distribution() -> None:
    mix, _ = load()
    decodes = mix.decodes(mix.window_tokens)
    assert sum(kind.share for kind in mix.kinds) == pytest.approx(1)
    for kind in mix.kinds:
        own = [(prompt, new) for name, prompt, new in decodes if name == kind.name]
        assert len(own) == round(kind.share * mix.requests) * kind.turns
        assert median(new for _, new in own) == pytest.approx(kind.new_tokens.median, rel=0.05)
        first = [prompt for prompt, _ in own[:: kind.turns]]
        assert median(first) == pytest.approx(kind.prompt_tokens.median, rel=0.05)
        logs = [math.log(new / kind.new_tokens.median) for _, new in own]
        assert (sum(x * x for x in logs) / len(logs)) ** 0.5 == pytest.approx(kind.new_tokens.sigma, rel=0.15)


def test_the_same_file_gives_the_same_requests() -> None:
    mix, _ = load()
    assert mix.decodes(8192) == mix.decodes(8192)
    # Written down once: the draw must not depend on the Python version or the machine.
    assert mix.decodes(131072)[:2] == [("chat", 1300, 117), ("chat", 3748, 176)]


@pytest.mark.parametrize("window", [512, 8192, 131072])
def test_no_decode_passes_the_window(window: int) -> None:
    decodes = load()[0].decodes(window)
    assert all(prompt >= 1 and new >= 1 and prompt + new <= window for _, prompt, new in decodes)


def test_the_prompt_of_a_turn_holds_the_turns_before() -> None:
    mix, _ = load()
    kind = next(kind for kind in mix.kinds if kind.turns > 1)
    loop = [(prompt, new) for name, prompt, new in mix.decodes(mix.window_tokens) if name == kind.name][: kind.turns]
    for (prompt, new), (later, _) in itertools.pairwise(loop):
        assert later >= prompt + new + kind.observation_tokens.low or later == mix.window_tokens


def test_lengths_are_cut_to_their_range() -> None:
    lengths = Lengths(100, 2.0, 50, 200)
    assert (lengths.at(0.001), lengths.at(0.5), lengths.at(0.999)) == (50, 100, 200)
    assert lengths.at(0.5, scale=0.001) == 1


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    record = copy.deepcopy(load()[1])
    place: Any = record
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("kinds", 0, "share"), 0.9, "add up to 1.4"),
        (("kinds", 0, "share"), None, "lacks 'share'"),
        (("kinds", 0, "turns"), 0, "turns"),
        (("kinds", 0, "new_tokens", "median"), 5000, "outside"),
        (("kinds", 0, "new_tokens", "sigma"), -1, "sigma"),
        (("kinds", 0, "new_tokens", "low"), 0, "low"),
        (("kinds",), [], "add up to 0"),
        (("requests",), 10**9, "at most"),
        (("schema",), 7, "schema 7"),
        (("window_tokens",), "8K", "window_tokens"),
    ],
)
def test_a_damaged_mix_is_one_sentence(path: tuple[Any, ...], value: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_record(changed(path, value), "mine.json")


def test_an_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    for text in ("{", "[1]"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"mine\.json"):
            load(file)
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "none.json")
    file.write_text(json.dumps(load()[1]))
    assert load(file)[0] == load()[0]
