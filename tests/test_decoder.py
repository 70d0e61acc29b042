"""Decode steps in every mode against transformers and float64, and what the steps say they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prefill import Prefill, logits, prefill
from artifact.errors import UserError
from artifact.kv.retain import budget
from artifact.kv.snapkv import SnapKV
from artifact.projection.teal import Calibration, calibrate
from artifact.projection.thresholds import PROJECTIONS, Thresholds
from tests.float64_decoder import Reference, Sparse
from tests.inputs import NAN, relative
from tests.models_fixture import MODELS, Loaded, token_ids
from tests.tolerances import KEEP_POINT, LOGITS

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, STEPS = 90, 24
METHOD = SnapKV(rows=8, sinks=2, pool="max", width=3)
MODES = {"dense": (1.0, 1.0), "projection": (0.5, 1.0), "kv": (1.0, 0.3), "both": (0.6, 0.4)}


def prefilled(weights: Weights, ids: torch.Tensor, prompt: int = PROMPT) -> Prefill:
    return prefill(weights, ids[:prompt], ids.shape[0], [prompt], METHOD.rows)


def packed_from(weights: Weights, filled: Prefill, keep: float, reserve: int = STEPS) -> PackedCache:
    """The selection over the prompt that `filled` holds, on a cache that has not moved on."""
    scale = weights.shape.head_dim**-0.5
    return METHOD.select(filled.cache, filled.queries[filled.cache.tokens], keep, scale, reserve)


def retained(packed: PackedCache, cache: KVCache) -> list[torch.Tensor]:
    """Return, per layer, the prompt positions (kv_heads, kept) whose keys and values the packed cache holds.

    Positions are found by comparing numbers, so a gather of the wrong rows, or of keys and values that do not belong
    together, finds none.
    """
    layers, kv_heads, _, _ = packed.keys.shape
    found = []
    for layer in range(layers):
        rows = []
        for head in range(kv_heads):
            kept = int(packed.lengths[layer, head])
            same = (packed.keys[layer, head, :kept, None] == cache.keys[layer, head, None, : packed.prompt_tokens]).all(
                -1
            )
            same &= (
                packed.values[layer, head, :kept, None] == cache.values[layer, head, None, : packed.prompt_tokens]
            ).all(-1)
            assert bool((same.sum(1) == 1).all()), "a packed entry is none of the prompt's"
            rows.append(same.int().argmax(1))
        found.append(torch.stack(rows))
    return found


def decode(decoder: Decoder, steps: int) -> torch.Tensor:
    """Take `steps` steps and return their (steps, V) logits."""
    decoder.check_room(steps)
    rows = []
    for _ in range(steps):
        decoder.step()
        rows.append(decoder.logits.clone())
    return torch.stack(rows)


@pytest.fixture(scope="module")
def calibrations(tiny: Tiny) -> Callable[[str], Calibration]:
    ready: dict[str, Calibration] = {}

    def get(name: str) -> Calibration:
        if name not in ready:
            ready[name] = calibrate(tiny(name).weights, token_ids(200, seed=9))
        return ready[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_fault_19_and_27_dense_steps_and_64_greedy_tokens_equal_transformers(tiny: Tiny, name: str) -> None:
    loaded = tiny(name)
    weights, ids = loaded.weights, token_ids(110)
    decoder = Decoder(weights, prefilled(weights, ids, 40).cache, ids)
    got = decode(decoder, 70)
    with torch.inference_mode():
        assert relative(got, loaded.model(ids[None]).logits[0, 40:]) < LOGITS
        expected = loaded.model.generate(
            ids[None, :40], attention_mask=torch.ones(1, 40), max_new_tokens=64, do_sample=False
        )[0]
    tokens = torch.zeros(105, dtype=torch.int64)
    tokens[:40] = ids[:40]
    # The step of the last prompt token gives the first new one: its entry is computed again in place.
    cache = prefill(weights, ids[:39], 105).cache
    greedy = Decoder(weights, cache, tokens, greedy=True)
    decode(greedy, 64)
    assert tokens[:104].tolist() == expected.tolist()


@pytest.mark.parametrize("mode", ["projection", "kv", "both"])
@pytest.mark.parametrize("name", ["llama", "llama-biased", "llama-llama3", "mistral", "qwen2", "qwen3"])
def test_fault_13_every_mode_equals_float64_with_masks_at_true_positions(
    tiny: Tiny, calibrations: Callable[[str], Calibration], name: str, mode: str
) -> None:
    loaded, ids = tiny(name), token_ids(PROMPT + STEPS)
    weights, (r_p, r_kv) = loaded.weights, MODES[mode]
    filled = prefilled(weights, ids)
    thresholds = calibrations(name).thresholds(r_p) if r_p < 1 else None
    packed = packed_from(weights, filled, r_kv) if r_kv < 1 else None
    kept = retained(packed, filled.cache) if packed is not None else None
    decoder = Decoder(weights, filled.cache, ids, thresholds, packed)
    got = decode(decoder, STEPS)

    limits = None if thresholds is None else thresholds.values
    expected, read = Reference(loaded.model).logits(ids, Sparse(PROMPT, limits, kept))
    dense, _ = Reference(loaded.model).logits(ids)
    assert relative(got, expected[PROMPT:]) < LOGITS
    # The mode is visible at all: with dense logits this test would prove nothing about the masks.
    assert relative(expected[PROMPT:], dense[PROMPT:]) > 100 * LOGITS
    counted = decoder.counted()
    if limits is not None:
        widths = torch.tensor([p.outputs for p in weights.shape.projections])
        total = STEPS * weights.shape.projection_params * weights.shape.layers
        assert counted.r_p == pytest.approx(float((read.kept * widths).sum()) / total, abs=1e-12)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3"])
def test_fault_13_keep_one_in_either_branch_equals_dense(
    tiny: Tiny, calibrations: Callable[[str], Calibration], name: str
) -> None:
    weights, ids = tiny(name).weights, token_ids(PROMPT + STEPS)
    dense = decode(Decoder(weights, prefilled(weights, ids).cache, ids), STEPS)
    filled = prefilled(weights, ids)
    kv = Decoder(weights, filled.cache, ids, packed=packed_from(weights, filled, 1.0))
    # The same entries in the same order: not even rounding may differ.
    assert torch.equal(decode(kv, STEPS), dense)
    projection = Decoder(weights, prefilled(weights, ids).cache, ids, calibrations(name).thresholds(1.0))
    assert relative(decode(projection, STEPS), dense) < LOGITS
    assert (kv.counted().r_kv, kv.counted().r_p) == (1.0, 1.0)
    assert (projection.counted().r_kv, projection.counted().r_p) == (1.0, 1.0)


def test_keep_one_in_both_branches_gives_the_same_64_greedy_tokens(
    tiny: Tiny, calibrations: Callable[[str], Calibration]
) -> None:
    weights, ids = tiny("qwen2").weights, token_ids(PROMPT)
    runs = []
    for sparse in (False, True):
        tokens = torch.zeros(PROMPT + 66, dtype=torch.int64)
        tokens[:PROMPT] = ids
        filled = prefill(weights, ids[: PROMPT - 1], PROMPT + 66, [PROMPT - 1], METHOD.rows)
        packed = packed_from(weights, filled, 1.0, 70) if sparse else None
        thresholds = calibrations("qwen2").thresholds(1.0) if sparse else None
        decode(Decoder(weights, filled.cache, tokens, thresholds, packed, greedy=True), 64)
        runs.append(tokens[PROMPT : PROMPT + 64].tolist())
    assert runs[0] == runs[1] and len(set(runs[0])) > 5


def test_fault_17_every_mode_reads_less_than_dense_and_gives_other_logits(
    tiny: Tiny, calibrations: Callable[[str], Calibration]
) -> None:
    weights, ids = tiny("mistral").weights, token_ids(PROMPT + STEPS)
    seen = {}
    for mode, (r_p, r_kv) in MODES.items():
        filled = prefilled(weights, ids)
        thresholds = calibrations("mistral").thresholds(r_p) if r_p < 1 else None
        packed = packed_from(weights, filled, r_kv) if r_kv < 1 else None
        decoder = Decoder(weights, filled.cache, ids, thresholds, packed)
        seen[mode] = decode(decoder, STEPS), decoder.counted()
    dense = seen["dense"][1]
    shape = weights.shape
    assert dense.projection_bytes == 4 * shape.layers * shape.projection_params
    assert dense.head_bytes == 4 * shape.vocab * shape.hidden
    # Steps at positions 90 .. 113 read 91 .. 114 entries: 102.5 on average, of keys and values per KV head.
    assert dense.kv_bytes == 102.5 * shape.layers * shape.kv_heads * 2 * shape.head_dim * 4
    assert (dense.r_p, dense.r_kv, dense.steps) == (1.0, 1.0, STEPS)
    for mode, (r_p, r_kv) in MODES.items():
        counted = seen[mode][1]
        assert counted.r_p == pytest.approx(r_p, abs=5 * KEEP_POINT)  # thresholds come from other tokens
        assert (counted.r_p < 1) == (r_p < 1) and (counted.r_kv < 1) == (r_kv < 1)
        assert counted.projection_bytes == pytest.approx(counted.r_p * dense.projection_bytes)
        assert counted.kv_bytes == pytest.approx(counted.r_kv * dense.kv_bytes)
        assert counted.step_bytes == counted.projection_bytes + counted.kv_bytes + counted.head_bytes
        if r_kv < 1:
            entries = budget(PROMPT, r_kv) + (STEPS + 1) / 2
            assert counted.r_kv == pytest.approx(entries / 102.5, abs=1e-12)
        if mode != "dense":
            assert counted.step_bytes < dense.step_bytes
            assert relative(seen[mode][0], seen["dense"][0]) > 100 * LOGITS


def test_fault_10_and_20_packed_entries_are_kept_and_counted_per_kv_head(tiny: Tiny) -> None:
    for name, kv_heads in (("llama", 1), ("llama-biased", 3)):  # three query heads in both
        weights, ids = tiny(name).weights, token_ids(PROMPT + STEPS)
        filled = prefilled(weights, ids)
        packed = packed_from(weights, filled, 0.3)
        assert packed.keys.shape == packed.values.shape == (3, kv_heads, 27 + STEPS, 64)
        decoder = Decoder(weights, filled.cache, ids, packed=packed)
        decode(decoder, 1)
        assert decoder.counted().kv_bytes == 28 * 3 * kv_heads * 2 * 64 * 4


def test_counting_starts_anew_on_reset(tiny: Tiny, calibrations: Callable[[str], Calibration]) -> None:
    weights, ids = tiny("llama").weights, token_ids(PROMPT + STEPS)
    filled = prefilled(weights, ids)
    packed = packed_from(weights, filled, 0.3)
    decoder = Decoder(weights, filled.cache, ids, calibrations("llama").thresholds(0.5), packed)
    with pytest.raises(RuntimeError, match="no step was counted"):
        decoder.counted()
    decode(decoder, 10)
    decoder.reset_counts()
    decode(decoder, 1)
    counted = decoder.counted()
    assert counted.steps == 1 and counted.r_kv == pytest.approx((27 + 11) / 101)
    assert 0.3 < counted.r_p < 0.7


def test_fault_15_a_prompt_decoded_after_another_is_independent_of_it(
    tiny: Tiny, calibrations: Callable[[str], Calibration]
) -> None:
    weights, a, b = tiny("qwen3").weights, token_ids(PROMPT + STEPS, seed=1), token_ids(PROMPT + STEPS, seed=2)
    thresholds = calibrations("qwen3").thresholds(0.5)

    def run(ids: torch.Tensor) -> Decoder:
        filled = prefilled(weights, ids)
        return Decoder(weights, filled.cache, ids, thresholds, packed_from(weights, filled, 0.3))

    alone = decode(run(b), STEPS)
    first, second = run(a), run(b)
    interleaved = []
    for step in range(STEPS):
        if step == 5:
            with pytest.raises(UserError):
                first.check_room(10**6)
        first.step()
        second.step()
        interleaved.append(second.logits.clone())
    assert torch.equal(torch.stack(interleaved), alone)


def test_fault_15_a_fork_is_independent_of_what_its_source_decodes(tiny: Tiny) -> None:
    weights, ids = tiny("llama").weights, token_ids(PROMPT + STEPS)
    source = prefilled(weights, ids).cache
    alone = decode(Decoder(weights, source.fork(60, 100), ids), STEPS)
    fork = source.fork(60, 100)
    decode(Decoder(weights, source, ids), STEPS)
    assert torch.equal(decode(Decoder(weights, fork, ids), STEPS), alone)
    expected = logits(weights, prefill(weights, ids[: 60 + STEPS]).hidden)[60:]
    assert relative(alone, expected) < LOGITS


def test_a_branch_can_be_switched_between_steps(tiny: Tiny, calibrations: Callable[[str], Calibration]) -> None:
    weights, ids = tiny("llama").weights, token_ids(PROMPT + STEPS)
    dense = decode(Decoder(weights, prefilled(weights, ids).cache, ids), STEPS)
    filled = prefilled(weights, ids)
    packed = packed_from(weights, filled, 1.0)
    branches = [
        Decoder(weights, filled.cache, ids, packed=packed),
        Decoder(weights, filled.cache, ids, calibrations("llama").thresholds(1.0), packed),
    ]
    rows = []
    for step in range(STEPS):
        branches[step % 2].step()
        rows.append(branches[step % 2].logits.clone())
    assert relative(torch.stack(rows), dense) < LOGITS


def test_fault_02_buffers_full_of_nan_do_not_reach_the_logits(tiny: Tiny) -> None:
    weights, ids = tiny("qwen3").weights, token_ids(PROMPT + STEPS)
    clean = decode(Decoder(weights, prefilled(weights, ids).cache, ids), 3)
    decoder = Decoder(weights, prefilled(weights, ids).cache, ids)
    decoder.cache.keys[:, :, PROMPT:] = NAN
    decoder.cache.values[:, :, PROMPT:] = NAN
    for buffer in vars(decoder.buffers).values():
        buffer.fill_(NAN)
    assert torch.equal(decode(decoder, 3), clean)


def test_fault_21_nan_in_unused_slots_of_both_caches_stays_there(tiny: Tiny) -> None:
    weights, ids = tiny("mistral").weights, token_ids(PROMPT + STEPS)
    filled = prefilled(weights, ids)
    packed = packed_from(weights, filled, 0.3)
    for tensor in (packed.keys, packed.values):
        tensor[:, :, 27:] = NAN
    assert bool(torch.isfinite(decode(Decoder(weights, filled.cache, ids, packed=packed), STEPS)).all())


def test_a_decoder_refuses_steps_without_room(tiny: Tiny) -> None:
    weights, ids = tiny("llama").weights, token_ids(PROMPT + 10)
    filled = prefilled(weights, ids)
    Decoder(weights, filled.cache, ids).check_room(10)
    with pytest.raises(UserError, match="11 decode steps asked for, the caches have room for 10"):
        Decoder(weights, filled.cache, ids).check_room(11)
    with pytest.raises(UserError, match="room for 4"):
        Decoder(weights, filled.cache, ids, packed=packed_from(weights, filled, 0.3, 4)).check_room(5)
    # The last greedy step writes the token after it, which needs a place too.
    greedy = Decoder(weights, filled.cache, ids, greedy=True)
    with pytest.raises(UserError, match="room for 9"):
        greedy.check_room(10)
    decode(greedy, 9)


def test_a_packed_cache_of_another_prompt_is_refused(tiny: Tiny) -> None:
    weights, ids = tiny("llama").weights, token_ids(PROMPT + STEPS)
    filled = prefilled(weights, ids)
    packed = packed_from(weights, filled, 0.3)
    with pytest.raises(UserError, match="selected from 90 tokens, the full cache holds 60"):
        Decoder(weights, filled.cache.fork(60, 100), ids, packed=packed)


def test_fault_09_thresholds_that_would_run_dense_or_misfit_are_refused(
    tiny: Tiny, calibrations: Callable[[str], Calibration]
) -> None:
    weights, ids = tiny("llama").weights, token_ids(PROMPT + STEPS)
    good = calibrations("llama").thresholds(0.5)
    cache = prefilled(weights, ids).cache
    deeper = replace(good, values=torch.cat((good.values, good.values)))
    with pytest.raises(UserError, match="thresholds for 6 layers, the model has 3"):
        Decoder(weights, cache, ids, deeper)
    broken = good.values.clone()
    broken[1, 2] = NAN  # |x| <= NaN is never true: the projection would silently be read in full
    with pytest.raises(UserError, match="NaN"):
        Thresholds(broken, 0.5, good.source)
    with pytest.raises(UserError, match=rf"\(3, 6\).*{len(PROJECTIONS)}"):
        Thresholds(good.values[:, :6], 0.5, good.source)
