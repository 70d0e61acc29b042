"""Attention-scored selection: which entries it keeps, against transformers' own attention weights in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.prefill import Prefill, prefill
from artifact.errors import UserError
from artifact.kv.retain import budget, choose, pack
from artifact.kv.snapkv import SnapKV
from tests.inputs import NAN, draw
from tests.models_fixture import Loaded, token_ids

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")
DEFAULT = SnapKV()


def filled(loaded: Loaded, count: int, rows: int = 64) -> Prefill:
    return prefill(loaded.weights, token_ids(count), query_lengths=[count], rows=rows)


def select(method: SnapKV, run: Prefill, keep: float, reserve: int = 0) -> PackedCache:
    count = run.cache.tokens
    return method.select(run.cache, run.queries[count], keep, run.cache.keys.shape[-1] ** -0.5, reserve)


def kept_positions(packed: PackedCache, cache: KVCache) -> list[list[list[int]]]:
    """Return positions per layer and KV head, found by comparing the keys themselves."""
    layers, kv_heads = packed.lengths.shape
    return [
        [
            [
                int(
                    (cache.keys[layer, head, : packed.prompt_tokens] == packed.keys[layer, head, slot])
                    .all(-1)
                    .nonzero()
                )
                for slot in range(int(packed.lengths[layer, head]))
            ]
            for head in range(kv_heads)
        ]
        for layer in range(layers)
    ]


def by_definition(model: Any, ids: torch.Tensor, method: SnapKV, count: int, kv_heads: int) -> list[list[list[int]]]:
    """Select from transformers' attention weights by the words of the method, one entry at a time."""
    with torch.inference_mode():
        attentions = model.double()(ids[None], output_attentions=True).attentions
    model.float()
    n, rows = ids.shape[0], min(method.rows, ids.shape[0])
    forced = set(range(n - rows, n)) | set(range(method.sinks))
    result = []
    for layer in attentions:
        summed = layer[0, :, n - rows :].sum(1).view(kv_heads, -1, n)
        scores = summed.max(1).values if method.aggregate == "max" else summed.mean(1)
        heads = []
        for score in scores:
            half = method.width // 2
            windows = [score[max(0, j - half) : j + half + 1] for j in range(n)]
            smoothed = [float(w.max() if method.pool == "max" else w.mean()) for w in windows]
            if method.pool == "none":
                smoothed = [float(s) for s in score]
            ranked = sorted(range(n), key=lambda j: (j not in forced, -smoothed[j], j))
            heads.append(sorted(ranked[:count]))
        result.append(heads)
    return result


@pytest.mark.parametrize(
    "method",
    [
        SnapKV(rows=8, sinks=4, pool="none", width=1),
        SnapKV(rows=8, sinks=2, pool="avg", width=5),
        SnapKV(rows=5, sinks=0, pool="avg", width=3, aggregate="max"),
        SnapKV(rows=16, sinks=4, pool="none", width=1, aggregate="max"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_the_selection_is_that_of_transformers_attention_weights(tiny: Tiny, name: str, method: SnapKV) -> None:
    loaded, count = tiny(name), 150
    run = filled(loaded, count)
    packed = select(method, run, 0.3)
    expected = by_definition(loaded.model, token_ids(count), method, 45, loaded.weights.shape.kv_heads)
    assert kept_positions(packed, run.cache) == expected


def test_max_pooling_keeps_neighbours_of_a_peak(tiny: Tiny) -> None:
    """Pooled scores tie around a peak to the last bit, so positions are checked by what they must hold."""
    run = filled(tiny("llama"), 150)
    method = SnapKV(rows=4, sinks=0, pool="max", width=5)
    peaks = kept_positions(select(replace(method, pool="none", width=1), run, 5 / 150), run.cache)
    wide = kept_positions(select(method, run, 9 / 150), run.cache)
    for layer, heads in enumerate(peaks):
        for head, positions in enumerate(heads):
            peak = positions[0]  # the one entry besides the four observation rows: the highest score
            near = set(range(max(0, peak - 2), peak + 3))
            assert len(near & set(wide[layer][head])) >= 4


@given(tokens=st.integers(1, 200_000), keep=st.floats(0.001, 1.0))
def test_fault_16_the_budget_is_the_request_rounded_half_up(tokens: int, keep: float) -> None:
    count = budget(tokens, keep)
    assert 1 <= count <= tokens
    assert abs(count - keep * tokens) <= 0.5 + 1e-9 or count == 1


def test_budgets_of_halves_and_of_one() -> None:
    assert [budget(n, 0.5) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert budget(10**6, 1.0) == 10**6 and budget(7, 0.001) == 1


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.0001, 2.0, NAN, float("inf")])
def test_fault_14_a_budget_above_the_prompt_or_of_nothing_is_refused(keep: float) -> None:
    with pytest.raises(UserError, match=r"KV keep ratio .* is not in \(0, 1\]"):
        budget(100, keep)


def test_fault_14_keep_one_keeps_everything_and_says_so(tiny: Tiny) -> None:
    run = filled(tiny("llama"), 40)
    packed = select(DEFAULT, run, 1.0, reserve=3)
    assert packed.keep_ratio() == 1.0 and packed.lengths.unique().tolist() == [40] and packed.capacity == 43
    assert torch.equal(packed.keys[:, :, :40], run.cache.keys)


@pytest.mark.parametrize("name", ["llama", "llama-biased"])
@pytest.mark.parametrize("keep", [0.02, 0.1, 0.3, 0.333, 0.9])
def test_fault_10_and_16_counted_entries_equal_the_request_per_kv_head(tiny: Tiny, name: str, keep: float) -> None:
    loaded = tiny(name)
    packed = select(DEFAULT, filled(loaded, 123), keep, reserve=5)
    shape, count = loaded.weights.shape, budget(123, keep)
    assert packed.keys.shape == packed.values.shape == (shape.layers, shape.kv_heads, count + 5, shape.head_dim)
    assert packed.lengths.shape == (shape.layers, shape.kv_heads)
    assert packed.lengths.unique().tolist() == [count]
    assert packed.keep_ratio() == count / 123 and packed.prompt_tokens == 123


@pytest.mark.parametrize("count", [20, 60, 99])
def test_fault_11_sinks_and_observation_rows_survive_uniform_scores(count: int) -> None:
    method = SnapKV(rows=16, sinks=4)
    forced = method.forced(100, count, torch.device("cpu"))
    index = choose(torch.zeros(3, 100), forced, count)
    for head in index.tolist():
        assert set(head) >= {0, 1, 2, 3} | set(range(84, 100))
        # Ties go to the earlier entry, so the rest is what follows the sinks.
        assert head == [*range(count - 16), *range(84, 100)]


@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 80), share=st.floats(0.01, 1.0), levels=st.integers(1, 4))
def test_fault_11_and_18_exact_count_and_forced_entries_however_scores_tie(
    seed: int, tokens: int, share: float, levels: int
) -> None:
    count = budget(tokens, share)
    scores = (draw(2, tokens, seed=seed) * levels).round() / levels
    forced = SnapKV(rows=5, sinks=3).forced(tokens, count, torch.device("cpu"))
    index = choose(scores, forced, count)
    assert index.shape == (2, count)
    for head, row in enumerate(index.tolist()):
        assert row == sorted(set(row)) and set(forced.nonzero().flatten().tolist()) <= set(row)
        chosen = scores[head, [j for j in row if not forced[j]]]
        rest = scores[head, [j for j in range(tokens) if j not in row]]
        assert not len(chosen) or not len(rest) or float(chosen.min()) >= float(rest.max())


@pytest.mark.parametrize("count", [1, 63, 64, 65])
@pytest.mark.parametrize("keep", [0.01, 0.3, 1.0])
def test_fault_12_prompts_around_the_observation_window_have_a_defined_result(
    tiny: Tiny, count: int, keep: float
) -> None:
    run = filled(tiny("llama-biased"), count)
    packed = select(SnapKV(rows=64), run, keep)
    kept = budget(count, keep)
    assert packed.lengths.unique().tolist() == [kept] and packed.keep_ratio() == kept / count
    for heads in kept_positions(packed, run.cache):
        # All entries are forced or nearly so: the latest rows first, then sinks.
        for positions in heads:
            assert positions[-min(kept, 60) :] == list(range(count - min(kept, 60), count))


def test_fault_12_a_budget_under_sinks_and_rows_keeps_the_latest_rows_then_sinks() -> None:
    method, device = SnapKV(rows=6, sinks=4), torch.device("cpu")
    assert method.forced(20, 3, device).nonzero().flatten().tolist() == [17, 18, 19]
    assert method.forced(20, 8, device).nonzero().flatten().tolist() == [0, 1, 14, 15, 16, 17, 18, 19]
    assert method.forced(3, 3, device).tolist() == [True] * 3


def test_fault_16_a_cache_is_never_taken_for_an_absent_one(tiny: Tiny) -> None:
    empty = KVCache.allocate(tiny("llama").weights.shape, 4, "cpu", torch.float32)
    assert bool(empty), "truth of a cache must not depend on how many tokens it holds"


@pytest.mark.parametrize(
    "other",
    [
        replace(DEFAULT, rows=8),
        replace(DEFAULT, sinks=12),
        replace(DEFAULT, pool="avg"),
        replace(DEFAULT, pool="none", width=1),
        replace(DEFAULT, width=3),
        replace(DEFAULT, aggregate="max"),
    ],
)
def test_fault_32_every_parameter_has_an_effect(tiny: Tiny, other: SnapKV) -> None:
    run = filled(tiny("llama"), 150)
    default, changed = (kept_positions(select(method, run, 0.3), run.cache) for method in (DEFAULT, other))
    assert default != changed


def test_fault_32_too_few_queries_for_the_observation_rows_are_refused(tiny: Tiny) -> None:
    run = filled(tiny("llama"), 150, rows=8)
    with pytest.raises(UserError, match="16 observation rows, but the prefill kept 8"):
        select(DEFAULT, run, 0.3)
    with pytest.raises(UserError, match="queries of 2 layers for a cache of 3"):
        DEFAULT.select(run.cache, filled(tiny("llama"), 150).queries[150][:2], 0.3, 0.125, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"rows": -1}, "rows is -1"),
        ({"sinks": -1}, "sinks is -1"),
        ({"width": 4}, "width is 4"),
        ({"width": 0}, "width is 0"),
        ({"pool": "none"}, "width is 21 without pooling"),
        ({"pool": "median"}, "pool is 'median'"),
        ({"aggregate": "sum"}, "aggregate is 'sum'"),
    ],
)
def test_impossible_parameters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SnapKV(**options)


def test_nan_scores_are_an_error_and_never_a_selection() -> None:
    scores = draw(2, 30)
    scores[1, 7] = NAN
    with pytest.raises(ValueError, match="NaN"):
        choose(scores, torch.zeros(30, dtype=torch.bool), 10)


def test_packing_leaves_the_full_cache_as_it_is(tiny: Tiny) -> None:
    run = filled(tiny("llama"), 40)
    before = run.cache.keys.clone(), run.cache.values.clone(), run.cache.tokens
    packed = pack(run.cache, [torch.tensor([[0, 5, 39]])] * 3, reserve=2)
    packed.keys.fill_(0)
    assert torch.equal(run.cache.keys, before[0]) and torch.equal(run.cache.values, before[1])
    assert run.cache.tokens == before[2] == 40
    assert packed.keep_ratio() == 3 / 40 and packed.capacity == 5
