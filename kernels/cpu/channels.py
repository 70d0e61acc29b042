"""Attention over pruned channels on the CPU: a split of packed vectors is expanded into scratch that stays in the L1
and L2 caches, then treated as a dense split is; the tail's splits follow.

Expanding costs some 150 cycles for a vector of 64 channels, more than the memory it saves takes here: on a CPU this
storage is smaller, not faster. Shared channels (ThinK) are not expanded but meet a shortened query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.channels import Pruned, Tail
from kernels.cpu.attention import SPLIT, _scores1, _scores3, _softmax, _weigh1, _weigh3
from kernels.cpu.common import FASTMATH, PRANGE, array, scratch
from kernels.cpu.ragged import combine


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _expand(kept, mask, signs, fill, dim, out):  # type: ignore[no-untyped-def]
    """Write one vector of `dim` channels: kept ones in order, +-fill elsewhere."""
    last = kept.shape[0] - 1
    taken = 0
    for c in range(dim):
        bit = (mask[c >> 5] >> (c & 31)) & 1
        value = fill
        if signs.shape[0] > 0:
            pruned = min(c - taken, 8 * signs.shape[0] - 1)
            if (signs[pruned >> 3] >> (pruned & 7)) & 1:
                value = -fill
        out[c] = kept[min(taken, last)] if bit else value
        taken += bit


@functools.cache
def _build(group: int, dim: int) -> Callable[..., None]:
    """Compile for one group size and head dimension, as `kernels.cpu.attention` does."""
    threes = group // 3 * 3

    @numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
    def pruned(  # type: ignore[no-untyped-def]
        query, kept, mask, channels, signs, fill, constant, values, value_mask, tail_keys, tail_values, lengths, scale,
        partial, state, out,
    ):  # fmt: skip
        kv_heads, tokens, width = kept.shape
        packed_splits = (tokens + SPLIT - 1) // SPLIT
        longest = 0
        for h in range(kv_heads):
            longest = max(longest, lengths[h] + 1)
        splits = packed_splits + (longest + SPLIT - 1) // SPLIT
        for program in numba.prange(kv_heads * splits):
            h = program // splits
            split = program - h * splits
            q, p = query[h * group : (h + 1) * group], np.empty((group, SPLIT), dtype=np.float32)
            partial[program] = np.float32(0)
            state[program, :, 0] = np.float32(-np.inf)
            state[program, :, 1] = np.float32(0)
            expanded = np.empty((SPLIT, dim), dtype=np.float32)
            if split < packed_splits:
                low = split * SPLIT
                count = min(SPLIT, tokens - low)
                if channels.shape[0] > 0:
                    short = np.empty((group, width), dtype=np.float32)
                    for g in range(group):
                        for c in range(width):
                            short[g, c] = q[g, channels[h, c]]
                    k = kept[h, low : low + count]
                    for g in range(0, threes, 3):
                        _scores3(short[g : g + 3], k, scale, width, p[g : g + 3, :count])
                    for g in range(threes, group):
                        _scores1(short[g : g + 1], k, scale, width, p[g : g + 1, :count])
                else:
                    for j in range(count):
                        magnitude = fill[h, low + j] if fill.shape[0] > 0 else constant
                        sign_row = signs[h, low + j] if signs.shape[0] > 0 else signs[:0].reshape(-1)
                        _expand(kept[h, low + j], mask[h, low + j], sign_row, magnitude, dim, expanded[j])
                    for g in range(0, threes, 3):
                        _scores3(q[g : g + 3], expanded[:count], scale, dim, p[g : g + 3, :count])
                    for g in range(threes, group):
                        _scores1(q[g : g + 1], expanded[:count], scale, dim, p[g : g + 1, :count])
                if value_mask.shape[0] > 0:
                    none = signs[:0].reshape(-1)
                    for j in range(count):
                        _expand(values[h, low + j], value_mask[h, low + j], none, np.float32(0), dim, expanded[j])
                    v = expanded[:count]
                else:
                    v = values[h, low : low + count]
            else:
                low = (split - packed_splits) * SPLIT
                count = max(0, min(SPLIT, lengths[h] + 1 - low))
                k = tail_keys[h, low : low + count]
                v = tail_values[h, low : low + count]
                for g in range(0, threes, 3):
                    _scores3(q[g : g + 3], k, scale, dim, p[g : g + 3, :count])
                for g in range(threes, group):
                    _scores1(q[g : g + 1], k, scale, dim, p[g : g + 1, :count])
            if count > 0:
                for g in range(group):
                    _softmax(p[g, :count], state[program, g])
                for g in range(0, threes, 3):
                    _weigh3(p[g : g + 3, :count], v, dim, partial[program, g : g + 3])
                for g in range(threes, group):
                    _weigh1(p[g : g + 1, :count], v, dim, partial[program, g : g + 1])
        for head in range(kv_heads * group):
            h = head // group
            # A shorter tail leaves empty splits at the end; they carry no weight and are left out.
            used = packed_splits + (lengths[h] + SPLIT) // SPLIT
            combine(partial, state, h * splits, h * splits + used, head % group, dim, out[head])

    return pruned


def bind(query: torch.Tensor, packed: Pruned, tail: Tail, out: torch.Tensor, scale: float) -> Launch:
    """Bind attention over a pruned prompt and its tail; shapes are checked by `kernels.channels.bind`."""
    heads, dim = query.shape
    kv_heads, capacity, _ = tail[0].shape
    group = heads // kv_heads
    splits = kv_heads * (-(-packed.kept.shape[1] // SPLIT) + -(-capacity // SPLIT))

    def given(name: str, tensor: torch.Tensor | None, rank: int, dtype: torch.dtype) -> np.ndarray:
        return array(name, torch.zeros([0] * rank, dtype=dtype) if tensor is None else tensor, dtype)

    return functools.partial(
        _build(group, dim),
        array("query", query),
        array("kept", packed.kept),
        given("mask", packed.mask, 3, torch.int32),
        given("channels", packed.channels, 2, torch.int32),
        given("signs", packed.signs, 3, torch.uint8),
        given("fill", packed.fill, 2, torch.float32),
        np.float32(packed.constant),
        array("values", packed.values),
        given("value mask", packed.value_mask, 3, torch.int32),
        array("tail keys", tail[0]),
        array("tail values", tail[1]),
        array("tail lengths", tail[2], torch.int32),
        np.float32(scale),
        scratch("partial", (splits, group, dim)),
        scratch("state", (splits, group, 2)),
        array("out", out).reshape(heads, dim),
    )
