"""SparK and ThinK: which channels are kept, what is stored and recovered, and steps that read the packed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.decoder import Decoder
from artifact.engine.prefill import prefill
from artifact.engine.pruned import PrunedCache, everything, query_strength
from artifact.engine.reference import gate_step
from artifact.errors import UserError
from artifact.kv.snapkv import SnapKV
from artifact.kv.spark import SparK, top_channels
from artifact.kv.think import ThinK
from tests.inputs import draw, relative
from tests.models_fixture import token_ids
from tests.test_decoder import Tiny, decode
from tests.tolerances import LOGITS

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = SparK(keep=0.25, rows=8, recent=8)
VARIANTS = [
    SMALL,
    replace(SMALL, signs=False),
    replace(SMALL, recovery="constant", signs=False),
    replace(SMALL, recovery="none", signs=False),
    replace(SMALL, value_keep=0.5, group=16, saliency="k2q"),
    ThinK(keep=0.25, rows=8, recent=8),
]


def source(layers: int = 2, kv_heads: int = 2, tokens: int = 40, dim: int = 64) -> PackedCache:
    """A packed cache of random entries."""
    size = (layers, kv_heads, tokens, dim)
    lengths = torch.full((layers, kv_heads), tokens, dtype=torch.int32)
    return PackedCache(draw(*size), draw(*size, seed=1), lengths, tokens)


def queries(layers: int = 2, heads: int = 4, rows: int = 8, dim: int = 64) -> list[torch.Tensor]:
    return [draw(heads, rows, dim, seed=20 + layer) for layer in range(layers)]


def pruned(variant: SparK | ThinK, cache: PackedCache, asked: list[torch.Tensor], reserve: int = 0) -> PrunedCache:
    packed = variant.compress(cache, asked, reserve)
    assert isinstance(packed, PrunedCache)
    return packed


def test_a_token_keeps_its_channels_of_largest_query_key_product() -> None:
    cache, asked = source(), queries()
    strength = asked[0].abs().double().view(2, 2, 8, 64).mean((1, 2))
    for saliency, power in (("qk", 1), ("k2q", 2)):
        packed = pruned(replace(SMALL, saliency=saliency), cache, asked)
        layer = packed.layers[0]
        for head, token in ((0, 0), (1, 31)):
            key = cache.keys[0, head, token].double()
            best = (key.abs() ** power * strength[head]).sort(descending=True).indices[:16].sort().values
            assert torch.equal(layer.kept[head, token], cache.keys[0, head, token][best])
    assert relative(query_strength(asked[0], 8, 2, 1), strength) < 1e-6


def test_channels_are_chosen_per_token_by_spark_and_per_head_by_think() -> None:
    cache, asked = source(), queries()
    masks = pruned(SMALL, cache, asked).layers[0].mask
    assert masks is not None and len({tuple(row) for row in masks[0].tolist()}) > 25
    layer = pruned(ThinK(keep=0.25, rows=8, recent=8), cache, asked).layers[0]
    assert layer.channels is not None and layer.channels.shape == (2, 16) and layer.mask is None
    score = asked[0].double().square().view(2, 2, 8, 64).mean((1, 2)) * cache.keys[0, :, :32].double().square().mean(1)
    assert layer.channels[1].tolist() == sorted(score[1].sort(descending=True).indices[:16].tolist())


def test_pruned_channels_come_back_as_their_mean_with_their_signs() -> None:
    cache, asked = source(), queries()
    keys = pruned(SMALL, cache, asked).entries(0).keys
    plain = pruned(replace(SMALL, signs=False), cache, asked).entries(0).keys
    original = cache.keys[0, 1, 5]
    kept = keys[1, 5] == original
    assert int(kept.sum()) == 16
    mean = original[~kept].abs().mean()
    assert torch.allclose(keys[1, 5][~kept], mean * original[~kept].sign())
    assert torch.allclose(plain[1, 5][~kept], original[~kept].mean().expand(48))
    assert torch.equal(keys[:, 32:], cache.keys[0, :, 32:]), "the recent tokens stay whole"


def test_everything_kept_is_the_cache_itself() -> None:
    cache, asked = source(), queries()
    for variant in (replace(SMALL, keep=1.0), ThinK(keep=1.0, rows=8, recent=8)):
        entries = pruned(variant, cache, asked).entries(1)
        assert torch.equal(entries.keys, cache.keys[1]) and torch.equal(entries.values, cache.values[1])


def test_stored_bytes_are_counted_from_the_tensors() -> None:
    """64 channels in float32: 16 kept, 8 bytes of mask, 6 of signs for 48 pruned channels, one statistic."""
    packed = pruned(SMALL, source(), queries(), reserve=3)
    assert packed.key_bytes() == 16 * 4 + 8 + 6 + 4
    assert packed.fixed_bytes == 2 * 2 * 32 * (82 + 256)
    assert packed.storage_bytes() == packed.fixed_bytes + 2 * 2 * 2 * 11 * 256
    shared = pruned(ThinK(keep=0.25, rows=8, recent=8), source(), queries())
    assert shared.key_bytes() == pytest.approx(64 + 16 * 4 / 32)
    short = pruned(replace(SMALL, value_keep=0.5), source(), queries())
    assert short.fixed_bytes == 2 * 2 * 32 * (82 + 128 + 8)


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
def test_fault_17_steps_read_the_packed_form_alone(tiny: Tiny, variant: SparK | ThinK) -> None:
    """Without a full cache, against dense steps on the vectors that attention is said to see."""
    weights, ids = tiny("mistral").weights, token_ids(80)
    filled = prefill(weights, ids[:70], 80, [70], 8)
    packed = pruned(variant, everything(filled.cache), filled.queries[70], 10)
    seen = filled.cache.fork(70, 80)
    for layer in range(3):
        entries = packed.entries(layer)
        seen.keys[layer, :, :70], seen.values[layer, :, :70] = entries.keys, entries.values
    decoder = Decoder(weights, filled.cache.released(), ids, packed=packed)
    got, expected = decode(decoder, 8), decode(Decoder(weights, seen, ids), 8)
    dense = decode(Decoder(weights, filled.cache, ids), 8)
    assert relative(got, expected) < LOGITS < relative(got, dense)
    assert decoder.counted().kv_bytes == packed.fixed_bytes + 9 * (8 + 4.5) * 512
    assert 0.5 < decoder.counted().r_kv < 0.95
    assert gate_step(decoder) < 1e-4


def test_it_works_on_what_token_eviction_left(tiny: Tiny) -> None:
    weights, ids = tiny("mistral").weights, token_ids(80)
    filled = prefill(weights, ids[:70], 80, [70], 8)
    evicted = SnapKV(rows=8, sinks=2, width=3).select(filled.cache, filled.queries[70], 0.5, 0.125, 0)
    packed = pruned(SMALL, evicted, filled.queries[70], 4)
    assert packed.retained == 35 and packed.prompt_tokens == 70
    assert torch.equal(packed.entries(0).values, evicted.values[0])
    assert packed.fixed_bytes == 9 * 27 * (82 + 256)
    assert packed.storage_bytes() - 9 * 4 * 512 < 0.83 * evicted.storage_bytes()


@pytest.mark.parametrize("variant", [replace(SMALL, recovery="sample"), replace(SMALL, top_p=0.9)])
def test_variants_without_a_kernel_are_simulated_and_stored_dense(variant: SparK) -> None:
    cache, asked = source(), queries()
    dense = variant.compress(cache, asked, 2)
    assert variant.simulated and isinstance(dense, PackedCache)
    assert dense.keys.shape == (2, 2, 42, 64) and torch.equal(dense.keys[:, :, 32:40], cache.keys[:, :, 32:])
    again, other = variant.compress(cache, asked, 2), replace(variant, seed=1).compress(cache, asked, 2)
    assert torch.equal(again.keys[:, :, :40], dense.keys[:, :, :40])
    assert torch.equal(other.keys[:, :, :40], dense.keys[:, :, :40]) == (variant.top_p is not None)


def test_top_p_keeps_the_fewest_channels_that_hold_the_share() -> None:
    variant = replace(SMALL, top_p=0.6)
    keys = torch.tensor([[[4.0, -3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]]])
    assert variant.chosen(keys, torch.ones(1, 4)).tolist() == [[[True, True, False, False], [True, True, True, False]]]
    assert top_channels(torch.ones(1, 4), 2).tolist() == [[True, True, False, False]]


def test_fault_12_and_what_does_not_fit_is_a_sentence() -> None:
    with pytest.raises(UserError, match="8 entries are cached and the 8 most recent stay whole"):
        SMALL.compress(source(tokens=8), queries(), 0)
    with pytest.raises(UserError, match="there are queries of 1 layers for a cache of 2"):
        SMALL.compress(source(), queries(layers=1), 0)
    ragged = source()
    ragged.lengths[0, 0] = 3
    with pytest.raises(UserError, match="heads keep equal numbers of entries"):
        ThinK(rows=8, recent=8).compress(ragged, queries(), 0)
    for wrong, sentence in (
        ({"keep": 0.0}, "share of key channels is 0"),
        ({"recovery": "magic"}, "recovery is 'magic'"),
        ({"recovery": "none"}, "sign bits belong to recovered magnitudes"),
    ):
        with pytest.raises(UserError, match=sentence):
            SparK(**wrong)
    with pytest.raises(UserError, match="groups of 5 channels do not divide a head of 64"):
        replace(SMALL, group=5).compress(source(), queries(), 0)


def test_fault_15_pruning_leaves_its_source_alone() -> None:
    cache = source()
    before = cache.keys.clone()
    pruned(SMALL, cache, queries())
    assert torch.equal(cache.keys, before)
    counters = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    full = KVCache(cache.keys, cache.values, *counters)
    full.set_tokens(40)
    assert torch.equal(everything(full).keys, cache.keys)
