"""Quest's pages against a plain choice, steps that read them, and PyramidKV's budgets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifact.engine.decoder import Decoder
from artifact.engine.prefill import prefill
from artifact.engine.ragged import pack_ragged
from artifact.engine.reference import gate_step
from artifact.engine.teacher import forward
from artifact.errors import UserError
from artifact.kv.pyramidkv import PyramidKV
from artifact.kv.quest import PagedCache, Quest
from artifact.kv.retain import budget
from artifact.kv.snapkv import SnapKV
from kernels import pages
from tests.inputs import relative
from tests.models_fixture import token_ids
from tests.test_decoder import Tiny, decode
from tests.tolerances import LOGITS

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = Quest(keep=0.3, page_tokens=8)


def chosen_of(packed: PagedCache, index: int) -> list[list[int]]:
    counts = packed.counts[index].tolist()
    return [packed.chosen[index, h, :count].tolist() for h, count in enumerate(counts)]


def test_each_step_reads_the_pages_of_highest_bounds_for_its_query(tiny: Tiny) -> None:
    """Choice of layer 0 over ten steps, across a page's end, against bounds taken from the keys themselves."""
    weights, ids = tiny("mistral").weights, token_ids(80)
    filled = prefill(weights, ids[:70], 80)
    packed = SMALL.select(filled.cache, 10)
    decoder = Decoder(weights, filled.cache.released(), ids, packed=packed)
    names = [op.name for op in decoder.ops]
    for step in range(10):
        for op in decoder.ops[: names.index("attention")]:
            op.launch()
        query = decoder.buffers.query.view(3, 3, 64)
        own = [packed.source.keys[packed.source.rows(0, h, 1)] for h in range(3)]
        assert chosen_of(packed, 0) == [pages.reference(query[h], own[h], 3, 8) for h in range(3)]
        last = (70 + step) // 8
        read = pages.read_entries(last + 1, 3, 71 + step, 8)
        assert packed.attended[0].tolist() == [read + last] * 3
        for op in decoder.ops[names.index("attention") :]:
            op.launch()


def test_reading_every_page_is_dense_and_costs_more(tiny: Tiny) -> None:
    weights, ids = tiny("qwen3").weights, token_ids(70)
    filled = prefill(weights, ids[:60], 70)
    packed = Quest(keep=1.0, page_tokens=8).select(filled.cache, 10)
    dense = decode(Decoder(weights, filled.cache.fork(60, 70), ids), 3)
    decoder = Decoder(weights, filled.cache, ids, packed=packed)
    assert relative(decode(decoder, 3), dense) < LOGITS
    entries = 62 + 8  # the mean of 61, 62, 63 and of the bounds of eight pages
    assert decoder.counted().kv_bytes == pytest.approx(3 * entries * 512)
    assert packed.storage_bytes() > filled.cache.keys.numel() * 8 * 60 / 70


def test_bytes_and_entries_are_what_was_read(tiny: Tiny) -> None:
    weights, ids = tiny("mistral").weights, token_ids(70)
    filled = prefill(weights, ids[:60], 70)
    decoder = Decoder(weights, filled.cache, ids, packed=SMALL.select(filled.cache, 10))
    dense = decode(Decoder(weights, filled.cache.fork(60, 70), ids), 2)
    assert relative(decode(decoder, 2), dense) > 100 * LOGITS
    # Three pages of eight, the last holding 5 and 6 entries, and eight pages' bounds.
    assert decoder.counted().kv_bytes == (16 + 5.5 + 8) * 9 * 512
    assert gate_step(decoder) < 1e-4


def test_catekv_reads_its_consistent_heads_whole_and_pages_the_adaptive_ones(tiny: Tiny) -> None:
    weights, ids = tiny("mistral").weights, token_ids(70)
    filled = prefill(weights, ids[:60], 70)
    short, every = torch.arange(50, 60), torch.arange(60)
    adaptive = torch.tensor([[True, False, False]] * 3)
    source = pack_ragged(filled.cache, [[every, short, short]] * 3, 10)
    packed = SMALL.over(source, adaptive)
    decoder = Decoder(weights, filled.cache.released(), ids, packed=packed)
    assert gate_step(decoder) < 1e-4
    assert packed.counts[0].tolist() == [3, -1, -1] and packed.attended[0].tolist() == [16 + 5 + 8 - 1, 10, 10]


def test_a_choice_per_query_is_refused_where_many_tokens_go_at_once(tiny: Tiny) -> None:
    weights, ids = tiny("mistral").weights, token_ids(70)
    filled = prefill(weights, ids[:60], 70)
    with pytest.raises(ValueError, match="decode the tokens step by step"):
        forward(weights, filled.cache, ids[60:64], None, SMALL.select(filled.cache, 10))
    with pytest.raises(UserError, match="page tokens is 48"):
        Quest(page_tokens=48)


@given(st.integers(1, 3000), st.floats(0.01, 1.0), st.integers(1, 40), st.floats(1.0, 50.0))
def test_fault_14_a_pyramid_holds_exactly_the_uniform_total(tokens: int, keep: float, layers: int, beta: float) -> None:
    counts = PyramidKV(beta=beta).counts(tokens, keep, layers)
    assert sum(counts) == layers * budget(tokens, keep)
    assert all(1 <= count <= tokens for count in counts)


def test_a_pyramid_falls_to_a_twentieth_and_keeps_its_observation_rows(tiny: Tiny) -> None:
    counts = PyramidKV().counts(1000, 0.2, 5)
    assert counts == [390, 295, 200, 105, 10]
    weights, ids = tiny("mistral").weights, token_ids(90)
    filled = prefill(weights, ids[:80], 90, [80], 16)
    method = PyramidKV(beta=2.0, rows=16, sinks=2, width=3)
    packed = method.select(filled.cache, filled.queries[80], 0.5, 0.125, 4)
    assert packed.lengths.tolist() == [[60] * 3, [40] * 3, [20] * 3]
    assert torch.equal(packed.keys[packed.rows(2, 1)][-16:], filled.cache.keys[2, 1, 64:80])
    flat = PyramidKV(beta=1.0, rows=16, sinks=2, width=3).select(filled.cache, filled.queries[80], 0.5, 0.125, 0)
    like = SnapKV(rows=16, sinks=2, width=3).select(filled.cache, filled.queries[80], 0.5, 0.125, 0)
    assert torch.equal(flat.entries(1).keys, like.keys[1])
