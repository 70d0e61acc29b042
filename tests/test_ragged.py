"""Attention over ragged storage against float64, whole and by pages, and the cache that it belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.prefill import prefill
from artifact.engine.ragged import pack_ragged
from artifact.engine.reference import gate_step
from artifact.errors import UserError
from kernels import ShapeError, attention, ragged, rope_append
from kernels.ragged import Pages
from tests.float64_decoder import Reference, Sparse
from tests.inputs import NAN, draw, filled, relative
from tests.models_fixture import token_ids
from tests.test_decoder import Tiny, decode
from tests.tolerances import ATTENTION, LOGITS, ROTATION

pytestmark = pytest.mark.usefixtures("one_thread")
EDGES = (0, 1, 255, 256, 257, 700, 3)


def storage(lengths: list[int], dim: int, gap: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and offsets of heads of these lengths (less their own entry), in scattered order; the rows that no
    head owns hold NaN.
    """
    order = sorted(range(len(lengths)), key=lambda h: (h * 5 + 2) % (len(lengths) + 1))
    rows, offsets = 0, torch.zeros(len(lengths), dtype=torch.int64)
    for h in order:
        offsets[h] = rows + gap
        rows += lengths[h] + 1 + gap
    keys, values = torch.full((rows + gap, dim), NAN), torch.full((rows + gap, dim), NAN)
    for h, length in enumerate(lengths):
        own = slice(int(offsets[h]), int(offsets[h]) + length + 1)
        keys[own], values[own] = draw(length + 1, dim, seed=h), draw(length + 1, dim, seed=h + 50)
    return keys, values, offsets


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, lengths: list[int],
    pages: Pages | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Outputs of the kernel and of float64, (heads, d) each."""
    live, out = torch.tensor(lengths, dtype=torch.int32), filled(query.numel())
    ragged.bind(query, keys, values, offsets, live, out, 0.125, sum(lengths) + len(lengths), pages)()
    wide = ragged.reference(query.double(), keys.double(), values.double(), offsets, live, 0.125, pages)
    return out.view_as(query), wide.view_as(query)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 64), (10, 2, 80)])
def test_fault_23_every_head_reads_its_own_length(heads: int, kv_heads: int, dim: int) -> None:
    lengths = [EDGES[h % len(EDGES)] for h in range(kv_heads)]
    got, expected = attend(draw(heads, dim), *storage(lengths, dim), lengths)
    assert relative(got, expected) < ATTENTION


def test_fault_21_rows_of_no_head_hold_nan_and_are_never_read() -> None:
    got, _ = attend(draw(9, 64), *storage([5, 300, 0], 64, gap=40), [5, 300, 0])
    assert bool(torch.isfinite(got).all())


@given(st.lists(st.integers(0, 530), min_size=1, max_size=5), st.integers(0, 1000), st.sampled_from([16, 64]))
def test_pages_read_exactly_their_entries(lengths: list[int], seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    most = max(length // size + 1 for length in lengths)
    chosen, counts = torch.zeros(len(lengths), most, dtype=torch.int32), torch.zeros(len(lengths), dtype=torch.int32)
    for h, length in enumerate(lengths):
        own = length // size + 1
        taken = torch.randperm(own, generator=generator)[: 1 + seed % own].sort().values
        counts[h] = -1 if (seed + h) % 4 == 0 else len(taken)
        chosen[h, : len(taken)] = taken.int()
    pages = Pages(chosen, counts, size)
    got, expected = attend(draw(3 * len(lengths), 64, seed=seed), *storage(lengths, 64), lengths, pages)
    assert relative(got, expected) < ATTENTION


def test_bytes_are_those_of_the_entries_read() -> None:
    lengths = torch.tensor([9, 40], dtype=torch.int32)
    pages = Pages(torch.tensor([[0, 0], [0, 2]], dtype=torch.int32), torch.tensor([-1, 2], dtype=torch.int32), 16)
    assert ragged.bytes_moved(draw(100, 64), lengths) == 2 * (10 + 41) * 64 * 4
    assert ragged.bytes_moved(draw(100, 64), lengths, pages) == 2 * (10 + 16 + 9) * 64 * 4


def test_shapes_that_do_not_fit_are_refused() -> None:
    keys, values, offsets = storage([4, 4], 64)
    live, out = torch.zeros(2, dtype=torch.int32), filled(5 * 64)
    with pytest.raises(ShapeError, match="5 query heads do not divide over 2 KV heads"):
        ragged.bind(draw(5, 64), keys, values, offsets, live, out, 1.0, 10)
    pages = Pages(torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 48)
    with pytest.raises(ShapeError, match="pages of 48 entries; give a divisor of 256"):
        ragged.bind(draw(4, 64), keys, values, offsets, live, filled(256), 1.0, 10, pages)


@pytest.mark.parametrize("stored", [True, False])
def test_a_new_entry_goes_behind_its_head_and_to_the_full_cache_where_there_is_one(stored: bool) -> None:
    dim, at = 64, torch.tensor([70], dtype=torch.int32)
    keys, values, offsets = storage([4, 9], dim)
    qkv, inv_freq, query = draw(8 * dim), draw(dim // 2).abs(), filled(4, dim)
    full = (filled(2, 80 if stored else 0, dim), filled(2, 80 if stored else 0, dim))
    live = torch.tensor([4, 9], dtype=torch.int32)
    rope_append.bind_rows(qkv, inv_freq, at, query, full, (keys, values, offsets, live))()
    turned = rope_append.rotate(qkv.view(8, dim).double(), 70 * inv_freq.double())
    assert relative(query, turned[:4]) < 10 * ROTATION
    for h, row in enumerate((offsets + live).tolist()):
        assert relative(keys[row], turned[4 + h]) < 10 * ROTATION
        assert torch.equal(values[row], qkv.view(8, dim)[6 + h])
        assert not stored or (torch.equal(full[0][h, 70], keys[row]) and torch.equal(full[1][h, 70], values[row]))


def indices(layers: int, kv_heads: int, prompt: int) -> list[list[torch.Tensor]]:
    """A different number of entries for every head."""
    counts = [[1 + (7 * layer + 23 * head) % prompt for head in range(kv_heads)] for layer in range(layers)]
    every = torch.arange(prompt)
    return [[every[:: max(1, prompt // count)][:count] for count in row] for row in counts]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_fault_13_ragged_steps_equal_float64_with_masks_at_true_positions(
    tiny: Tiny, name: str, released: bool
) -> None:
    loaded, prompt, steps = tiny(name), 90, 12
    weights, ids = loaded.weights, token_ids(102)
    cache = prefill(weights, ids[:prompt], ids.shape[0]).cache
    chosen = indices(weights.shape.layers, weights.shape.kv_heads, prompt)
    packed = pack_ragged(cache, chosen, steps)
    kept = sum(len(index) for layer in chosen for index in layer)
    pairs = weights.shape.layers * weights.shape.kv_heads
    assert packed.storage_bytes() == 2 * (kept + steps * pairs) * 64 * 4 + 12 * pairs
    decoder = Decoder(weights, cache.released() if released else cache, ids, packed=packed)
    got = decode(decoder, steps)
    expected, _ = Reference(loaded.model).logits(ids, Sparse(prompt, None, chosen))
    dense, _ = Reference(loaded.model).logits(ids)
    assert relative(got, expected[prompt:]) < LOGITS
    assert relative(expected[prompt:], dense[prompt:]) > 100 * LOGITS
    counted = decoder.counted()
    assert counted.kv_bytes == (kept + pairs * (steps + 1) / 2) * 2 * 64 * 4
    assert decoder.cache.keys.numel() == 0 or not released
    with pytest.raises(UserError, match="1 decode steps asked for, the caches have room for 0"):
        decoder.check_room(1)


def test_the_gate_checks_a_ragged_step_and_finds_a_foreign_row(tiny: Tiny) -> None:
    weights, ids = tiny("mistral").weights, token_ids(60)
    cache = prefill(weights, ids[:50], 60).cache
    packed = pack_ragged(cache, indices(3, 3, 50), 8)
    decoder = Decoder(weights, cache.released(), ids, packed=packed)
    assert gate_step(decoder) < 1e-4
    decoder.packed = replace(packed, offsets=packed.offsets.clone())  # what the reference goes by
    packed.offsets[1, 1] -= 1
    with pytest.raises(RuntimeError, match="key in the attended cache of layer 1 differs from its reference"):
        gate_step(decoder)


def test_a_released_cache_needs_a_branch_of_its_own(tiny: Tiny) -> None:
    weights = tiny("llama").weights
    cache = KVCache.allocate(weights.shape, 8, "cpu", torch.float32)
    with pytest.raises(UserError, match="the full cache was released and no KV branch is given"):
        Decoder(weights, cache.released(), token_ids(9))


def test_fault_10_and_20_bytes_are_counted_by_kv_heads() -> None:
    cache = KVCache(draw(2, 2, 20, 64), draw(2, 2, 20, 64), torch.zeros(1, dtype=torch.int32),
                    torch.zeros(2, 2, dtype=torch.int32))  # fmt: skip
    cache.set_tokens(20)
    packed = pack_ragged(cache, [[torch.arange(4), torch.arange(7)], [torch.arange(1), torch.arange(20)]], 0)
    assert packed.keys.shape == (32, 64) and packed.entry_bytes == 2 * 64 * 4
    assert packed.keep_ratio() == pytest.approx(32 / 80)


def test_a_fused_step_refuses_a_full_cache_without_room() -> None:
    """It would write past it; a packed cache then takes the new entry by itself (tests/test_kv_arms.py)."""
    none, own = (filled(3, 0, 64), filled(3, 0, 64)), (draw(3, 8, 64), draw(3, 8, 64))
    live, at = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="the full cache has no room for the new entry"):
        attention.bind_step(draw(15 * 64), draw(32), at, none, (*own, live), live, filled(9 * 64), 0.1)
