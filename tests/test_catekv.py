"""CateKV: the observation matrix against a plain reference, head types by vote, and what each kind of head keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifact.engine.cache import KVCache
from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.kv.catekv import CateKV, head_count, identify, variation
from tests.inputs import draw, relative
from tests.models_fixture import token_ids
from tests.test_decoder import Tiny

SMALL = CateKV(rows=8, sinks=4, recent=8, critical=10)


def filled_cache(layers: int, kv_heads: int, tokens: int, dim: int = 16, seed: int = 0) -> KVCache:
    """A cache of random entries."""
    size = (layers, kv_heads, tokens, dim)
    counters = torch.zeros(1, dtype=torch.int32), torch.zeros(layers, kv_heads, dtype=torch.int32)
    cache = KVCache(draw(*size, seed=seed), draw(*size, seed=seed + 1), *counters)
    cache.set_tokens(tokens)
    return cache


def test_frequency_counts_the_rows_in_which_a_token_is_critical() -> None:
    """Row by row in float64, with the causal end of each row, without any of the method's tensor operations."""
    queries, keys, scale = draw(4, 8, 16), draw(2, 60, 16, seed=1), 0.4
    f, mass = SMALL.frequency(queries, keys, scale)
    for head in range(2):
        matrix = torch.zeros(8, 48, dtype=torch.float64)
        for row in range(8):
            seen = 60 - 8 + row + 1
            for query in (queries[2 * head, row], queries[2 * head + 1, row]):
                weights = torch.softmax(keys[head, :seen].double() @ query.double() * scale, 0)
                matrix[row] += torch.nn.functional.pad(weights, (0, 60 - seen))[4:52] / 2
        threshold = matrix.flatten().sort(descending=True).values[8 * 10 - 1]
        assert f[head].tolist() == (matrix >= threshold - 1e-9).sum(0).tolist()
        assert relative(mass[head], matrix.sum(0)) < 1e-5
        assert int(f[head].sum()) == 8 * 10


def test_rows_that_agree_vary_more_than_rows_that_differ() -> None:
    """One token set named by all rows gives std / mean = sqrt((1 - p) / p); a spread one gives less."""
    same = torch.zeros(1, 8, 48)
    same[:, :, :10] = 1.0
    apart = torch.zeros(1, 8, 48)
    for row in range(8):
        apart[0, row, (5 * row + torch.arange(10)) % 48] = 1.0
    high, low = (variation(SMALL.binarised(m + 1e-3).sum(1)) for m in (same, apart))
    assert float(high) == pytest.approx((38 / 10) ** 0.5) and float(low) < 0.5 * float(high)
    assert float(variation(torch.zeros(1, 5))) == 0.0


def test_an_upper_percentile_leaves_the_largest_weights_out() -> None:
    observed = torch.arange(96.0).view(1, 8, 12)
    counted = CateKV(rows=8, sinks=0, recent=1, critical=6, upper=0.75).binarised(observed)
    assert observed[counted].tolist() == list(map(float, range(48, 72)))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.floats(0.01, 1.0), st.integers(0, 99))
def test_fault_18_ratios_alone_and_together_give_the_same_exact_masks(
    samples: int, layers: int, kv_heads: int, share: float, seed: int
) -> None:
    """Coarse values tie often: a tie must not overfill, and a smaller ratio must not leave a trace."""
    found = (draw(samples, layers, kv_heads, seed=seed) * 2).round()
    alone = identify(found, share)
    for other in (0.1, 0.5, 1.0):
        identify(found, other)
    assert torch.equal(identify(found, share), alone)
    assert int(alone.sum()) == head_count(layers * kv_heads, share)


def test_votes_decide_before_ranks_and_low_variation_is_adaptive() -> None:
    found = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 9.0, 0.5, 4.0]], [[9.0, 1.0, 0.5, 4.0]]])
    assert identify(found, 0.5).tolist() == [[True, False, True, False]]
    with pytest.raises(ValueError, match="hold NaN"):
        identify(found * float("nan"), 0.5)


def test_consistent_heads_keep_the_budget_and_adaptive_heads_eta() -> None:
    cache, queries = filled_cache(2, 3, 60), [draw(6, 8, 16, seed=9)] * 2
    adaptive = torch.tensor([[True, False, False], [False, False, True]])
    packed = SMALL.select(cache, queries, adaptive, 0.25, reserve=5)
    assert packed.lengths.tolist() == [[60, 22, 22], [22, 22, 60]]
    f, mass = SMALL.frequency(queries[0], cache.keys[0], 0.25)
    wanted = sorted(range(48), key=lambda j: (-float(f[1, j]), -float(mass[1, j]), j))[:10]
    positions = [*range(4), *sorted(4 + j for j in wanted), *range(52, 60)]
    assert torch.equal(packed.keys[packed.rows(0, 1)], cache.keys[0, 1, positions])
    assert torch.equal(packed.values[packed.rows(0, 1)], cache.values[0, 1, positions])
    half = CateKV(rows=8, sinks=4, recent=8, critical=10, eta=0.5).select(cache, queries, adaptive, 0.25, 0)
    assert half.lengths.tolist() == [[30, 22, 22], [22, 22, 30]]


def test_fault_11_forced_entries_survive_uniform_scores() -> None:
    cache = filled_cache(1, 1, 60)
    cache.keys.zero_()
    packed = SMALL.select(cache, [draw(2, 8, 16)], torch.tensor([[False]]), 0.25, 0)
    kept = packed.values[packed.rows(0, 0)]
    assert torch.equal(kept[:4], cache.values[0, 0, :4]) and torch.equal(kept[-8:], cache.values[0, 0, 52:])


@pytest.mark.parametrize("tokens", [1, 7, 8, 12, 21, 22])
def test_fault_12_a_prompt_within_the_budget_keeps_everything(tokens: int) -> None:
    cache = filled_cache(1, 2, tokens)
    packed = SMALL.select(cache, [draw(2, min(8, tokens), 16)], torch.tensor([[False, True]]), 0.25, 0)
    assert packed.lengths.tolist() == [[tokens, tokens]] and packed.keep_ratio() == 1.0


def test_fault_15_selections_are_independent_and_leave_the_cache_alone(tiny: Tiny) -> None:
    weights = tiny("mistral").weights
    filled = prefill(weights, token_ids(60), 60, [60], SMALL.rows)
    before = filled.cache.keys.clone()
    adaptive = identify(SMALL.scores(filled.cache, filled.queries[60], 0.125)[None], 0.4)
    first = SMALL.select(filled.cache, filled.queries[60], adaptive, 0.125, 0)
    SMALL.select(filled.cache, [draw(9, 8, 64)] * 3, ~adaptive, 0.125, 0)
    again = SMALL.select(filled.cache, filled.queries[60], adaptive, 0.125, 0)
    assert torch.equal(first.keys, again.keys) and torch.equal(filled.cache.keys, before)
    assert int(adaptive.sum()) == head_count(9, 0.4)


def test_what_does_not_fit_is_a_sentence() -> None:
    cache = filled_cache(2, 3, 60)
    with pytest.raises(UserError, match=r"head types of \(1, 3\) heads for a cache of \(2, 3\)"):
        SMALL.select(cache, [], torch.ones(1, 3, dtype=torch.bool), 0.25, 0)
    with pytest.raises(UserError, match="a prompt of 12 tokens has none between 4 sinks and 8 recent tokens"):
        SMALL.scores(filled_cache(1, 1, 12), [draw(1, 8, 16)], 0.25)
    with pytest.raises(UserError, match="eta is 0"):
        CateKV(eta=0.0)
