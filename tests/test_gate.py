"""The gate on made-up costs: prices by hand, choices against brute force, and tables that it must refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact.account import Mode
from artifact.deploy import gate as gates
from artifact.deploy.gate import Check, Gate, Table
from artifact.deploy.gate_costs import Line, costs_from
from artifact.errors import UserError
from tests.models_fixture import Loaded

CONTEXTS = (1024, 2048, 8192)


def table(**changes: Any) -> Table:
    """Dense 20 ms + 1 us per token; projections save 6 ms, the selection 70% of the cache for 0.1 ms per token once."""
    made = Table(
        version=gates.version(),
        model="sha-1",
        model_name="tiny",
        device="a processor, 2 threads",
        dtype="float32",
        r_p=0.5,
        r_kv=0.3,
        window_tokens=8192,
        contexts=CONTEXTS,
        step_ms={
            Mode.DENSE: tuple(20 + 0.001 * n for n in CONTEXTS),
            Mode.PROJECTION: tuple(14 + 0.001 * n for n in CONTEXTS),
            Mode.KV: tuple(20 + 0.0003 * n for n in CONTEXTS),
            Mode.BOTH: tuple(14 + 0.0003 * n for n in CONTEXTS),
        },
        selection_ms=tuple(0.1 * n for n in CONTEXTS),
        checks=(),
        steps=24,
        text="a text",
    )
    return replace(made, **changes)


points = st.lists(st.floats(1, 1e4), min_size=1, max_size=6, unique=True).map(sorted)


@given(points, st.data())
def test_the_total_is_the_sum_wherever_a_line_is_straight(x: list[float], data: st.DataObject) -> None:
    slope, base = data.draw(st.floats(-2, 2)), data.draw(st.floats(-10, 10))
    line = Line([(value, base + slope * value) for value in x])
    start, count = data.draw(st.integers(0, 12_000)), data.draw(st.integers(1, 200))
    if len(x) < 2 or start < x[0] + 1:
        return
    assert line.total(start, count) == pytest.approx(sum(line.at(start + i) for i in range(count)), rel=1e-6, abs=1e-3)


def test_a_line_is_constant_before_its_points_and_goes_on_behind_them() -> None:
    line = Line([(10, 5.0), (20, 7.0), (30, 6.0)])
    assert [line.at(x) for x in (0, 10, 15, 20, 25, 40)] == pytest.approx([5, 5, 6, 7, 6.5, 5])
    assert line.total(0, 5) == pytest.approx(25)
    assert Line([(10, 5.0)]).at(99) == 5.0
    with pytest.raises(ValueError, match="increasing"):
        Line([(2, 1.0), (2, 3.0)])


def test_costs_by_hand() -> None:
    costs = table().costs()
    assert costs.request_ms(Mode.DENSE, 2000, 100) == pytest.approx(sum(20 + 0.001 * (2000 + i) for i in range(100)))
    # 0.3 x 4000 entries are read at first, and one more with every step: 1 us each, as in dense decoding.
    expected = sum(20 + 0.001 * (1200 + i) for i in range(50)) + 400
    assert costs.request_ms(Mode.KV, 4000, 50) == pytest.approx(expected)
    assert costs.once(Mode.PROJECTION, 4000) == 0


def test_past_the_measured_entries_a_selection_grows_like_dense_decoding() -> None:
    noisy = {**table().step_ms, Mode.KV: (20.4, 20.5, 90.0)}
    costs = costs_from(CONTEXTS, noisy, [(1024, 1.0)], 0.3)
    end = 0.3 * CONTEXTS[-1]
    assert costs.step_ms[Mode.KV].at(end + 1000) == pytest.approx(91.0)


def test_a_mode_with_a_missing_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        costs_from(CONTEXTS, {Mode.DENSE: [1.0, 2.0]}, [(1024, 1.0)], 0.3)


@given(st.integers(1, 8191), st.integers(1, 8191))
def test_the_choice_is_the_cheapest_admissible_mode(prompt: int, new: int) -> None:
    gate = Gate(table(checks=(Check(Mode.BOTH, "perplexity", False, "+40%"),)))
    if prompt + new > 8192:
        return
    chosen = gate.choose(prompt, new)
    modes = (Mode.DENSE, Mode.PROJECTION, Mode.KV) if prompt >= CONTEXTS[0] else (Mode.DENSE, Mode.PROJECTION)
    priced = {mode: gate.costs.request_ms(mode, prompt, new) for mode in modes}
    assert chosen.ms == min(priced.values())
    assert chosen.dense_ms == priced[Mode.DENSE]
    assert chosen.mode is not Mode.BOTH


def test_the_selection_must_repay_itself() -> None:
    gate = Gate(table())
    assert gate.choose(6000, 8).mode is Mode.PROJECTION
    assert gate.choose(6000, 2000).mode is Mode.BOTH


def test_prompts_shorter_than_any_that_was_tested_keep_their_cache() -> None:
    """A selection of 6 from 20 entries answered nonsense; no table has such a length."""
    gate = Gate(table())
    for new in (8, 48, 4000):
        assert gate.choose(20, new).mode is Mode.PROJECTION
    assert gate.choose(CONTEXTS[0], 4000).mode is Mode.BOTH


def test_a_skipped_test_admits_and_a_failed_one_does_not() -> None:
    checks = (Check(Mode.KV, "passkey", False, "2 of 8"), Check(Mode.BOTH, "passkey", None, "skipped"))
    assert table(checks=checks).admissible() == (Mode.DENSE, Mode.PROJECTION, Mode.BOTH)


@pytest.mark.parametrize(("prompt", "new"), [(0, 5), (5, 0), (8000, 193), (True, 4), (5.0, 4)])
def test_lengths_outside_the_window_are_refused(prompt: Any, new: Any) -> None:
    with pytest.raises(UserError, match="prompt"):
        Gate(table()).choose(prompt, new) if new else Gate(table()).choose(8192, 1)


def written(folder: Path, made: Table | None = None) -> Path:
    path = folder / "gate.json"
    gates.write_table(path, made or table())
    return path


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    made = table(checks=(Check(Mode.KV, "multikey", True, "8 of 8"), Check(Mode.KV, "perplexity", None, "skipped")))
    assert gates.read_table(written(tmp_path, made)) == made
    assert Gate.load(tmp_path / "gate.json", model="sha-1", device=made.device).table == made


def test_a_table_of_another_model_device_or_version_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    device = table().device
    with pytest.raises(UserError, match="made for model 'sha-1', this is 'sha-2'"):
        Gate.load(path, model="sha-2", device=device)
    with pytest.raises(UserError, match="made for device"):
        Gate.load(path, model="sha-1", device="another processor, 2 threads")
    written(tmp_path, table(version="0.0.1"))
    with pytest.raises(UserError, match="made for version"):
        Gate.load(path, model="sha-1", device=device)


def change(record: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return record | {key: value}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "menu"),
        ("schema", 99),
        ("contexts", [2048, 1024, 8192]),
        ("contexts", [1024, 2048]),
        ("selection_ms", [1.0, float("inf"), 2.0]),
        ("step_ms", {"dense": [1, 2, 3]}),
        ("checks", [{"mode": "kv", "name": "passkey", "passed": "yes", "detail": ""}]),
        ("model", "tiny"),
    ],
)
def test_damaged_tables_are_one_sentence(tmp_path: Path, key: str, value: Any) -> None:
    path = written(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()), key, value)))
    with pytest.raises(UserError, match=r"gate\.json"):
        Gate.load(path, model="sha-1", device=table().device)


def test_a_checkpoint_is_named_as_its_weights_are(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    assert gates.model_identity(str(loaded.path)) == loaded.weights.identity
