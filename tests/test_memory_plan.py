"""Which contexts fit a GPU, against bytes counted by hand."""

from __future__ import annotations

import pytest

from artifact.engine.memory_plan import (
    RUNTIME_BYTES,
    Fit,
    fit,
    group_bytes,
    masked_bytes,
    needed_bytes,
    prefill_bytes,
    scratch_bytes,
    weight_bytes,
)
from artifact.measure.cells import Row, member
from artifact.shapes import known_shape

LLAMA_8B, LLAMA_3B = known_shape("llama-3.1-8b"), known_shape("llama-3.2-3b")
MODES = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.3), (0.5, 0.3))


def sweep(longest: int) -> list[list[Row]]:
    return [[member(n, *mode) for n in (1024, longest) for mode in MODES]]


def test_weights_are_counted_in_both_layouts_and_tied_tables_once() -> None:
    projections = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    assert weight_bytes(LLAMA_8B, 2) == 2 * (2 * projections + 2 * 128256 * 4096)
    projections = 28 * (3072 * (3072 + 2 * 1024) + 3072 * 3072 + 3 * 3072 * 8192)
    assert weight_bytes(LLAMA_3B, 2) == 2 * (2 * projections + 128256 * 3072)


def test_gate_mask_arms_hold_down_twice_and_adapters_copies_of_gate_and_down() -> None:
    third, token = 32 * 4096 * 14336, 4 * 32 * 8 * 128 * 2
    single = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096) + 3 * third + 2 * 128256 * 4096
    rest = scratch_bytes(LLAMA_8B, 1100, 4) + prefill_bytes(LLAMA_8B, 1100, 4) + RUNTIME_BYTES
    assert masked_bytes(LLAMA_8B, 4, 1100, 4, 0) == 4 * (single + third) + 5 * 1100 * token + rest
    assert masked_bytes(LLAMA_8B, 4, 1100, 5, 2) == 4 * (single + 5 * third) + 6 * 1100 * token + rest


def test_synthetic_members_share_one_cache_and_real_ones_copy_it() -> None:
    token = 2 * 32 * 8 * 128 * 2
    group = [member(1000), member(2000, r_kv=0.5)]
    shared = group_bytes(LLAMA_8B, group, 2000, 2, synthetic=True)
    assert shared == (2128 + 1128) * token
    assert group_bytes(LLAMA_8B, group, 2000, 2, synthetic=False) == shared + (1128 + 2128) * token
    masked = group_bytes(LLAMA_8B, [member(2000, path="masked")], 2000, 2, True)
    assert masked == 2128 * token + 2 * 2 * 32 * 128 * 2000


def test_real_weights_need_room_for_their_prefill_but_never_for_rows_times_vocabulary() -> None:
    extra = prefill_bytes(LLAMA_8B, 131072, 2)
    assert extra == 131072 * (4 * 4096 + 2 * 2 * 4096) < 131072 * 4 * LLAMA_8B.vocab / 10
    group = [member(131072)]
    caches = group_bytes(LLAMA_8B, group, 131072, 2, False) - group_bytes(LLAMA_8B, group, 131072, 2, True)
    needed = [needed_bytes(LLAMA_8B, [group], 131072, 2, synthetic) for synthetic in (False, True)]
    assert needed[0] - needed[1] == caches + extra


def test_a_large_card_runs_everything_and_a_cpu_is_never_cut() -> None:
    assert fit(LLAMA_8B, sweep, 131072, 2, True, 139 << 30) == Fit(131072, "")
    assert fit(LLAMA_8B, sweep, 131072, 4, True, None) == Fit(131072, "")


def test_a_card_of_24_gb_runs_the_3b_model_at_shorter_contexts_and_says_so() -> None:
    free = 24 * 10**9 - (1 << 30)
    found = fit(LLAMA_3B, sweep, 131072, 2, True, free)
    assert isinstance(found, Fit) and 16384 <= found.tokens < 131072
    assert found.note.startswith(f"contexts cut from 128K to {found.tokens // 1024}K tokens: 128K needs")
    assert needed_bytes(LLAMA_3B, sweep(found.tokens), found.tokens, 2, True) <= free
    assert needed_bytes(LLAMA_3B, sweep(2 * found.tokens), 2 * found.tokens, 2, True) > free


def test_what_does_not_fit_at_all_is_named_with_the_reason() -> None:
    found = fit(LLAMA_8B, sweep, 131072, 2, True, 24 * 10**9)
    assert isinstance(found, str)
    assert found.startswith("Llama-3.1-8B needs ") and "the GPU has 24.0 GB free; choose a smaller --model" in found


@pytest.mark.parametrize("longest", [131072, 100_000, 65_536 + 256])
def test_cut_contexts_are_powers_of_two_so_that_a_resumed_run_asks_for_the_same(longest: int) -> None:
    found = fit(LLAMA_3B, sweep, longest, 2, True, 22 * 10**9)
    assert isinstance(found, Fit) and found.tokens & (found.tokens - 1) == 0 and found.tokens < longest
