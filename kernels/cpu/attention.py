"""Split-K decode attention for grouped queries: fixed-size key splits in parallel, then an ordered combine.

A split is SPLIT keys of one KV head whatever the thread count, so results do not depend on it. Inside a split, blocks
of BLOCK keys stay in the first-level cache while all query heads of the group use them; keys are taken from four
quarters of a block and values from eight eighths, which keeps several read streams in flight (measured at 4K, 2
threads: 21 GB/s against 13 with one stream).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import FASTMATH, array, exp32
from kernels.cpu.rope_append import arguments, rope_append
from kernels.rope_append import Packed

SPLIT = 512
BLOCK = 256


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _scores(query, keys, scale, dim, out):  # type: ignore[no-untyped-def]
    count = keys.shape[0]
    quarter = count // 4
    for j in range(quarter):
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for d in range(dim):
            x = query[d]
            s0 += keys[j, d] * x
            s1 += keys[j + quarter, d] * x
            s2 += keys[j + 2 * quarter, d] * x
            s3 += keys[j + 3 * quarter, d] * x
        out[j], out[j + quarter] = s0 * scale, s1 * scale
        out[j + 2 * quarter], out[j + 3 * quarter] = s2 * scale, s3 * scale
    for j in range(4 * quarter, count):
        s0 = np.float32(0)
        for d in range(dim):
            s0 += keys[j, d] * query[d]
        out[j] = s0 * scale


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _weigh(probability, values, dim, out):  # type: ignore[no-untyped-def]
    count = values.shape[0]
    e = count // 8
    for j in range(e):
        p0, p1, p2, p3 = probability[j], probability[j + e], probability[j + 2 * e], probability[j + 3 * e]
        p4, p5 = probability[j + 4 * e], probability[j + 5 * e]
        p6, p7 = probability[j + 6 * e], probability[j + 7 * e]
        for d in range(dim):
            left = (p0 * values[j, d] + p1 * values[j + e, d]) + (p2 * values[j + 2 * e, d] + p3 * values[j + 3 * e, d])
            right = (p4 * values[j + 4 * e, d] + p5 * values[j + 5 * e, d]) + (
                p6 * values[j + 6 * e, d] + p7 * values[j + 7 * e, d]
            )
            out[d] += left + right
    for j in range(8 * e, count):
        p0 = probability[j]
        for d in range(dim):
            out[d] += p0 * values[j, d]


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _softmax_block(score, state):  # type: ignore[no-untyped-def]
    """Turn scores into exp(score - running max); update (max, sum) in state; return the factor for earlier sums."""
    highest = state[0]
    for j in range(score.shape[0]):
        highest = max(highest, score[j])
    total = np.float32(0)
    for j in range(score.shape[0]):
        e = exp32(score[j] - highest)
        score[j] = e
        total += e
    correction = exp32(state[0] - highest)
    state[0] = highest
    state[1] = state[1] * correction + total
    return correction


@functools.cache
def _build(group: int, dim: int) -> Callable[..., None]:
    """Compile for one group size and head dimension: constant trip counts let LLVM keep a query row in registers.

    The closure holds two integers only, so that the on-disk cache of compiled code finds it again in the next process.
    With `append` the call starts with `rope_append`, whose arguments come after those of attention.
    """

    @numba.njit(parallel=True, fastmath=FASTMATH, cache=True)
    def attention(  # type: ignore[no-untyped-def]
        append, keys, values, lengths, scale, partial, state, out,
        qkv, inv_freq, scaling, position, query, full_keys, full_values, packed, packed_keys, packed_values,
        packed_lengths, q_norm, k_norm, eps,
    ):  # fmt: skip
        if append:
            rope_append(
                qkv, inv_freq, scaling, position, query, full_keys, full_values, packed, packed_keys, packed_values,
                packed_lengths, q_norm, k_norm, eps,
            )  # fmt: skip
        kv_heads = keys.shape[0]
        longest = 0
        for h in range(kv_heads):
            longest = max(longest, lengths[h] + 1)
        splits = (longest + SPLIT - 1) // SPLIT
        for program in numba.prange(kv_heads * splits):
            h = program // splits
            low = (program - h * splits) * SPLIT
            high = min(lengths[h] + 1, low + SPLIT)
            score = np.empty(BLOCK, dtype=np.float32)
            partial[program] = np.float32(0)
            state[program, :, 0] = np.float32(-np.inf)
            state[program, :, 1] = np.float32(0)
            for start in range(low, high, BLOCK):
                stop = min(start + BLOCK, high)
                block_keys, block_values = keys[h, start:stop], values[h, start:stop]
                block_score = score[: stop - start]
                for g in range(group):
                    _scores(query[h * group + g], block_keys, scale, dim, block_score)
                    correction = _softmax_block(block_score, state[program, g])
                    accumulator = partial[program, g]
                    if correction != np.float32(1):
                        for d in range(dim):
                            accumulator[d] *= correction
                    _weigh(block_score, block_values, dim, accumulator)
        for head in range(kv_heads * group):
            first, g = head // group * splits, head % group
            # A head may be shorter than the longest: its empty splits carry no weight and are left out.
            used = (lengths[head // group] + SPLIT) // SPLIT
            highest = np.float32(-np.inf)
            for s in range(first, first + used):
                highest = max(highest, state[s, g, 0])
            total = np.float32(0)
            row = out[head]
            row[:] = np.float32(0)
            for s in range(first, first + used):
                weight = exp32(state[s, g, 0] - highest)
                total += weight * state[s, g, 1]
                for d in range(dim):
                    row[d] += weight * partial[s, g, d]
            for d in range(dim):
                row[d] /= total

    return attention


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> Launch:
    """Bind decode attention over lengths[h] + 1 entries per KV head; shapes are checked by `kernels.attention.bind`."""
    heads, dim = query.shape
    rotated, nothing = array("query", query), torch.zeros(0)
    unused = arguments(
        nothing, nothing, torch.zeros(1, dtype=torch.int32), rotated, (keys, values), None, None, None, 0.0, 1.0
    )
    return _bind(False, keys, values, lengths, out, scale, heads, dim, unused)


def bind_step(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    full: tuple[torch.Tensor, torch.Tensor],
    packed: Packed | None,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    scaling: float,
) -> Launch:
    """Bind rotation, append and attention in one call; shapes are checked by `kernels.attention.bind_step`."""
    dim = full[0].shape[2]
    heads = out.shape[0] // dim
    keys, values = full if packed is None else (packed[0], packed[1])
    query = np.empty((heads, dim), dtype=np.float32)
    rope = arguments(qkv, inv_freq, position, query, full, packed, q_norm, k_norm, eps, scaling)
    return _bind(True, keys, values, lengths, out, scale, heads, dim, rope)


def _bind(
    append: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    heads: int,
    dim: int,
    rope: tuple[Any, ...],
) -> Launch:
    kv_heads, capacity, _ = keys.shape
    group = heads // kv_heads
    programs = kv_heads * -(-capacity // SPLIT)
    return functools.partial(
        _build(group, dim),
        append,
        array("keys", keys),
        array("values", values),
        array("lengths", lengths, torch.int32),
        np.float32(scale),
        np.empty((programs, group, dim), dtype=np.float32),
        np.empty((programs, group, 2), dtype=np.float32),
        array("out", out).reshape(heads, dim),
        *rope,
    )
