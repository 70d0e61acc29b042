"""A batched step against its sequences decoded alone: tokens, logits, caches and what is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from artifact.engine.batch import BatchDecoder, Member
from artifact.engine.batch_check import check_step
from artifact.engine.cache import PackedCache
from artifact.engine.decoder import Decoder
from artifact.engine.prefill import prefill
from artifact.engine.ragged import RaggedCache
from artifact.errors import UserError
from artifact.kv.catekv import CateKV
from artifact.kv.snapkv import SnapKV
from artifact.projection import teal
from artifact.projection.thresholds import Thresholds
from tests.inputs import relative
from tests.models_fixture import Loaded, token_ids
from tests.tolerances import LOGITS

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (40, 57, 90)  # of the sequences of a batch
STEPS = 5


def members(loaded: Loaded, keep: float | None) -> list[Member]:
    """Sequences of different lengths, each with its own prompt and, with a keep ratio, its own selection."""
    made = []
    for seed, length in enumerate(LENGTHS):
        tokens = torch.zeros(length + STEPS + 1, dtype=torch.int64)
        tokens[: length + 1] = token_ids(length + 1, seed)
        filled = prefill(loaded.weights, tokens[:length], length + STEPS, (length,), 16)
        packed: PackedCache | None = None
        if keep is not None:
            scale = loaded.weights.shape.head_dim**-0.5
            packed = SnapKV().select(filled.cache, filled.queries[length], keep, scale, STEPS)
        made.append(Member(filled.cache, tokens, packed))
    return made


def retained(loaded: Loaded) -> list[Member]:
    """The same sequences, each holding nothing but what CateKV keeps: heads of unequal lengths, no full cache."""
    method, made = CateKV(rows=16, sinks=2, recent=6, critical=12), []
    shape = loaded.weights.shape
    adaptive = torch.arange(shape.layers * shape.kv_heads).view(shape.layers, shape.kv_heads) % 3 == 0
    for seed, length in enumerate(LENGTHS):
        tokens = torch.zeros(length + STEPS + 1, dtype=torch.int64)
        tokens[: length + 1] = token_ids(length + 1, seed)
        filled = prefill(loaded.weights, tokens[:length], length, (length,), 16)
        own = method.select(filled.cache, filled.queries[length], adaptive, shape.head_dim**-0.5, STEPS)
        made.append(Member(filled.cache.released(), tokens, own))
    return made


def calibrated(loaded: Loaded, keep: float) -> Thresholds:
    return teal.calibrate(loaded.weights, token_ids(200, 9)).thresholds(keep)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen2"])
@pytest.mark.parametrize("r_p", [None, 0.5])
@pytest.mark.parametrize("r_kv", [None, 0.4])
def test_a_batch_decodes_what_its_sequences_decode_alone(
    name: str, r_p: float | None, r_kv: float | None, tiny: Callable[[str], Loaded]
) -> None:
    loaded = tiny(name)
    thresholds = None if r_p is None else calibrated(loaded, r_p)
    together, alone = members(loaded, r_kv), members(loaded, r_kv)
    batch = BatchDecoder(loaded.weights, together, thresholds, greedy=True)
    single = [Decoder(loaded.weights, m.cache, m.tokens, thresholds, m.packed, greedy=True) for m in alone]
    batch.check_room(STEPS)
    for _ in range(STEPS):
        batch.step()
        for number, decoder in enumerate(single):
            decoder.step()
            assert relative(batch.logits[number], decoder.logits.double()) < 10 * LOGITS
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.cache.lengths, b.cache.lengths) and a.cache.tokens == b.cache.tokens
    counted, own = batch.counted(), [decoder.counted() for decoder in single]
    assert counted.r_p == pytest.approx(sum(one.r_p for one in own) / len(own))
    assert counted.kv_bytes == pytest.approx(sum(one.kv_bytes for one in own))
    assert counted.steps == STEPS and counted.head_bytes == own[0].head_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_batch_of_ragged_caches_decodes_what_its_sequences_decode_alone(
    name: str, tiny: Callable[[str], Loaded]
) -> None:
    loaded = tiny(name)
    together, alone = retained(loaded), retained(loaded)
    batch = BatchDecoder(loaded.weights, together, greedy=True)
    single = [Decoder(loaded.weights, m.cache, m.tokens, None, m.packed, greedy=True) for m in alone]
    batch.check_room(STEPS)
    with pytest.raises(UserError, match=f"sequence 0 has room for {STEPS}"):
        batch.check_room(STEPS + 1)
    for _ in range(STEPS):
        batch.step()
        for number, decoder in enumerate(single):
            decoder.step()
            assert relative(batch.logits[number], decoder.logits.double()) < 10 * LOGITS
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert a.packed is not None and b.packed is not None and torch.equal(a.packed.lengths, b.packed.lengths)
    counted, own = batch.counted(), [decoder.counted() for decoder in single]
    assert counted.kv_bytes == pytest.approx(sum(one.kv_bytes for one in own))
    assert counted.r_kv < 0.75


def test_a_ragged_copy_has_storage_of_its_own(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    original = retained(loaded)[0].packed
    assert isinstance(original, RaggedCache)
    copy = original.fork()
    before = copy.keys.clone()
    original.keys.zero_()
    original.lengths.add_(1)
    assert torch.equal(copy.keys, before) and copy.room() == STEPS
    assert copy.storage_bytes() == original.storage_bytes()


def test_the_check_of_a_ragged_batch_finds_a_sequence_that_reads_anothers_cache(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    made = retained(loaded)
    assert check_step(BatchDecoder(loaded.weights, made)) < 1e-3
    batch, ops = BatchDecoder(loaded.weights, retained(loaded)), range(len(LENGTHS))
    places = [index for index, op in enumerate(batch.ops) if op.name == "attention"]
    mixed = BatchDecoder(loaded.weights, [dataclasses.replace(made[0], packed=made[number].packed) for number in ops])
    batch._launches[places[0]] = mixed._launches[places[1]]
    with pytest.raises(RuntimeError, match="differs from that of the sequence alone"):
        check_step(batch)


def test_the_union_is_counted_from_the_masks(tiny: Callable[[str], Loaded]) -> None:
    """u_B lies between the largest own share and the sum, and equals the union of the masks at the embeddings' site."""
    loaded = tiny("llama")
    thresholds = calibrated(loaded, 0.5)
    batch = BatchDecoder(loaded.weights, members(loaded, None), thresholds)
    batch.step()
    counted = batch.counted()
    assert counted.r_p < counted.u_b < min(1.0, 3 * counted.r_p)
    first = loaded.weights.layers[0]
    rows = torch.stack([
        loaded.weights.embedding[m.tokens[length]] for m, length in zip(batch.sequences, LENGTHS, strict=True)
    ]).double()  # fmt: skip
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + loaded.weights.eps) * first.attention_norm
    active = (normed.abs() > thresholds.values[0, 0]).any(0)
    assert batch._kept[0, 0] == int(active.sum())
    assert counted.projection_bytes == pytest.approx(
        counted.u_b * 4 * loaded.weights.shape.layers * loaded.weights.shape.projection_params
    )


def test_one_sequence_has_the_union_of_its_own_channels(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    batch = BatchDecoder(loaded.weights, members(loaded, None)[:1], calibrated(loaded, 0.6))
    batch.step()
    counted = batch.counted()
    assert counted.u_b == pytest.approx(counted.r_p)


def test_the_same_prompt_twice_adds_nothing_to_the_union(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    one, other = members(loaded, None)[0], members(loaded, None)[0]
    batch = BatchDecoder(loaded.weights, [one, other], calibrated(loaded, 0.6))
    batch.step()
    assert batch.counted().u_b == pytest.approx(batch.counted().r_p)


def test_counts_start_anew(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    batch = BatchDecoder(loaded.weights, members(loaded, 0.4), calibrated(loaded, 0.5), greedy=True)
    with pytest.raises(RuntimeError, match="no step"):
        batch.counted()
    batch.step()
    batch.reset_counts()
    batch.step()
    batch.step()
    assert batch.counted().steps == 2
    assert 0.4 < batch.counted().r_kv < 0.55


def test_what_makes_no_batch_is_refused(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    with pytest.raises(UserError, match="0 sequences"):
        BatchDecoder(loaded.weights, [])
    with pytest.raises(UserError, match="17 sequences"):
        BatchDecoder(loaded.weights, members(loaded, None)[:1] * 17)
    with pytest.raises(UserError, match="nothing to attend to"):
        BatchDecoder(loaded.weights, [dataclasses.replace(retained(loaded)[0], packed=None)])
    with pytest.raises(UserError, match="all or none"):
        BatchDecoder(loaded.weights, [members(loaded, None)[0], members(loaded, 0.4)[1]])
    batch = BatchDecoder(loaded.weights, members(loaded, None), greedy=True)
    with pytest.raises(UserError, match="sequence 0 has room for 5"):
        batch.check_room(6)
