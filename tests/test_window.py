"""Sinks and a recent window: exact positions at every size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.kv.retain import budget
from artifact.kv.window import Window
from tests.models_fixture import Loaded, token_ids


@given(tokens=st.integers(1, 3000), keep=st.floats(0.001, 1.0), sinks=st.integers(0, 80))
def test_fault_16_exactly_the_budget_sinks_first_the_rest_recent(tokens: int, keep: float, sinks: int) -> None:
    index, count = Window(sinks).index(tokens, keep).tolist(), budget(tokens, keep)
    assert index == sorted(set(index)) and len(index) == count and 0 <= index[0] and index[-1] == tokens - 1
    first = min(sinks, count - 1)
    assert index == [*range(first), *range(tokens - (count - first), tokens)]


@pytest.mark.parametrize(
    ("tokens", "keep", "expected"),
    [
        (1, 0.3, [0]),
        (63, 0.05, [0, 1, 62]),
        (64, 0.1, [0, 1, 2, 3, 62, 63]),
        (65, 0.02, [64]),
        (5, 1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_fault_12_short_prompts_and_small_budgets(tokens: int, keep: float, expected: list[int]) -> None:
    assert Window(4).index(tokens, keep).tolist() == expected


def test_the_packed_window_holds_those_rows_of_every_head(tiny: Callable[[str], Loaded]) -> None:
    weights = tiny("mistral").weights
    cache = prefill(weights, token_ids(80)).cache
    packed = Window(4).select(cache, 0.25, reserve=6)
    index = [0, 1, 2, 3, *range(64, 80)]
    assert packed.keys.shape == (3, 3, 26, 64) and packed.lengths.unique().tolist() == [20]
    assert torch.equal(packed.keys[:, :, :20], cache.keys[:, :, index])
    assert torch.equal(packed.values[:, :, :20], cache.values[:, :, index])
    assert packed.keep_ratio() == 0.25


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UserError, match="sinks is -1"):
        Window(-1)
    with pytest.raises(UserError, match="keep ratio"):
        Window(4).index(10, 0.0)
