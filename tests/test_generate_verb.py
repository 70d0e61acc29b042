"""`artifact generate` and `artifact gate` as commands: text piece by piece, plans, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from artifact.account import Mode
from artifact.cli import main
from artifact.deploy import gate as gates
from artifact.deploy.gate import Gate
from artifact.deploy.gate_figure import choice_map, draw
from artifact.deploy.gate_quality import configurations, perplexity_checks, retrieval_checks, skipped
from artifact.engine.session import Session
from artifact.errors import UserError
from artifact.measure.configuration import Configuration
from artifact.verbs import generate
from tests.models_fixture import Loaded, token_ids
from tests.test_gate import table

pytestmark = pytest.mark.usefixtures("one_thread")


class Letters:
    """A tokenizer whose tokens are bytes: the character é takes two, and alone each of them decodes to U+FFFD."""

    eos_token_id = 0

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_are_whole_characters_and_lose_nothing() -> None:
    words = generate.Words(Letters())  # type: ignore[arg-type]
    raw = "déjà vu – ok".encode()
    pieces = [words.push(token) for token in raw]
    assert "".join(pieces) + words.rest() == "déjà vu – ok"
    assert "\ufffd" not in "".join(pieces)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    words = generate.Words(Letters())  # type: ignore[arg-type]
    assert [words.push(token) for token in "é".encode()[:1]] == [""]
    assert words.rest() == "\ufffd"


def test_streaming_follows_its_plan_and_stops_at_the_end_token(tiny: Callable[[str], Loaded]) -> None:
    class Ends(Letters):
        eos_token_id = -1

        def decode(self, ids: list[int]) -> str:
            return "".join(f"<{token}>" for token in ids)

    weights = tiny("llama").weights
    made = Session(weights, token_ids(30), 6, None, 1.0, 0.5)
    text = "".join(generate.stream(made, Ends(), {0: Mode.DENSE, 2: Mode.KV}, 6))  # type: ignore[arg-type]
    assert text.count("<") == 6
    assert [(one.mode, one.steps) for one in made.stretches()] == [(Mode.DENSE, 2), (Mode.KV, 4)]
    end = Ends()
    end.eos_token_id = int(made.tokens[31])
    short = Session(weights, token_ids(30), 6, None, 1.0, 0.5)
    pieces = list(generate.stream(short, end, {0: Mode.DENSE}, 6))  # type: ignore[arg-type]
    assert len(pieces) <= 1
    found = generate.report(short, "asked for")
    assert found["new_tokens"] in (1, 2)
    assert "MB/step" in generate.card(found)


def test_switch_plans() -> None:
    assert generate.switch_plan(["3:kv", "5:dense"], 8) == {3: Mode.KV, 5: Mode.DENSE}
    for wrong in (["kv"], ["0:kv"], ["8:kv"], ["3:fast"], ["3:kv", "3:dense"], ["-1:kv"], ["3:auto"]):
        with pytest.raises(UserError, match="--switch"):
            generate.switch_plan(wrong, 8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt-file", "none.txt"], "none.txt cannot be read"),
        (["--prompt-file", "empty.txt"], "is empty"),
        (["--prompt-file", "latin.txt"], "not UTF-8"),
        (["--prompt-file", "p.txt", "--mode", "kv", "--gate", "g.json"], "--gate goes with --mode auto"),
        (["--prompt-file", "p.txt", "--r-p", "0.5"], "keep ratios from the gate's table"),
        (["--prompt-file", "p.txt", "--mode", "dense", "--model", "llama-3.1-8b"], "needs trained weights"),
        (["--prompt-file", "p.txt", "--new-tokens", "0"], "0"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("p.txt").write_text("Once upon a time")
    assert main(["generate", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--r-p", "1"], "--r-p is 1"),
        (["--r-kv", "0"], "--r-kv"),
        (["--placements", "3"], "multiple of 4"),
        (["--model", "llama-3.1-405b", "--skip-quality"], "llama-3.1-405b"),
        (["--model", "missing/model"], "does not exist"),
    ],
)
def test_a_gate_of_nonsense_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--profile", "embedded", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_auto_follows_the_table_and_refuses_a_foreign_one(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    from types import SimpleNamespace

    bench: Any = SimpleNamespace(weights=tiny("llama").weights)
    profile: Any = SimpleNamespace(device="cpu", model="a/b/tiny")
    path = tmp_path / "gate.json"
    with pytest.raises(UserError, match="run `artifact gate --model tiny`"):
        generate.ask_gate(bench, profile, str(path), 100, 10)
    own = table(model=bench.weights.identity, device=gates.current_device("cpu"))
    gates.write_table(path, own)
    mode, why, r_p, r_kv = generate.ask_gate(bench, profile, str(path), 6000, 2000)
    assert (mode, r_p, r_kv) == (Mode.BOTH, 0.5, 0.3) and "dense" in why
    gates.write_table(path, table())
    with pytest.raises(UserError, match="made for model"):
        generate.ask_gate(bench, profile, str(path), 6000, 2000)


def test_the_picture_is_the_same_bytes_and_the_map_covers_the_window(tmp_path: Path) -> None:
    gate = Gate(table())
    draw(gate, tmp_path / "a.png")
    draw(gate, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    prompts, generated, chosen = choice_map(gate)
    for i in (0, 40, len(generated) - 1):
        for j in (0, 50, len(prompts) - 1):
            if prompts[j] + generated[i] > 8192:
                assert chosen[i][j] is None
            else:
                assert chosen[i][j] is gate.choose(prompts[j], generated[i]).mode


ARMS = configurations(0.7, 0.3)


def windows(losses: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"kind": "window", "label": label, "window": w, "nll": [loss + 0.1 * w] * 8, "protocol": "p", "scored": 8}
        | {"window_tokens_hash": f"h{w}"}
        for label, loss in losses.items()
        for w in range(3)
    ]


def test_a_mode_beyond_the_budget_is_not_admitted() -> None:
    labels = {mode: arm.label for mode, arm in ARMS.items()}
    losses = {labels[Mode.DENSE]: 2.0, labels[Mode.PROJECTION]: 2.04, labels[Mode.KV]: 2.1, labels[Mode.BOTH]: 2.3}
    found = {check.mode: check.passed for check in perplexity_checks(windows(losses), ARMS, 0.12)}
    assert found == {Mode.PROJECTION: True, Mode.KV: True, Mode.BOTH: False}  # e^0.1 - 1 is 10.5%, e^0.3 - 1 is 35%


def answer(arm: Configuration, test: str, prompt: str, right: bool) -> dict[str, Any]:
    outcome = "right" if right else "distractor"
    return {"test": test, "label": arm.label, "prompt_id": prompt, "outcome": outcome}


def test_a_branch_that_loses_placements_is_not_admitted() -> None:
    rows = [answer(ARMS[Mode.DENSE], "passkey", f"p{i}", True) for i in range(10)]
    rows += [answer(ARMS[Mode.KV], "passkey", f"p{i}", i < 9) for i in range(10)]
    # As many right answers as dense decoding, but to other prompts.
    rows += [answer(ARMS[Mode.BOTH], "passkey", f"p{i + 5}", True) for i in range(10)]
    found = {(check.mode, check.name): check.passed for check in retrieval_checks(rows, ARMS)}
    assert found[Mode.KV, "passkey"] is True
    assert found[Mode.BOTH, "passkey"] is False
    assert found[Mode.KV, "multikey"] is None  # dense decoding answered none


def test_skipped_checks_are_said_for_every_mode() -> None:
    found = skipped("synthetic weights have no quality")
    assert {(check.mode, check.name) for check in found} >= {(Mode.BOTH, "multikey"), (Mode.PROJECTION, "perplexity")}
    assert all(check.passed is None and "synthetic" in check.detail for check in found)
