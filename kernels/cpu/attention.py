"""Split-K decode attention for grouped queries: fixed-size key splits in parallel, then an ordered combine.

A split is SPLIT keys of one KV head whatever the thread count, so results do not depend on it. Up to three query
heads of a group are taken together, so that every key and value is loaded once for all of them and memory is asked
for all the time: with one head after the other, the caches serve all but the first and memory idles meanwhile (19.9
against 22.8 GB/s at 8K with 2 threads). Keys and values come from the four quarters of a split: a thread that reads one
stream gets 15 GB/s where four give 22 (docs/log-cpu-kernels.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import FASTMATH, PRANGE, array, exp32, scratch
from kernels.cpu.rope_append import arguments, rope_append
from kernels.rope_append import Packed

SPLIT = 256


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _scores1(q, keys, scale, dim, out):  # type: ignore[no-untyped-def]
    """Write scale q . k of every key for one query head, q (1, d), out (1, keys)."""
    qa, oa = q[0], out[0]
    e = keys.shape[0] // 4
    for j in range(e):
        w, x, y, z = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for d in range(dim):
            w += keys[j, d] * qa[d]
            x += keys[j + e, d] * qa[d]
            y += keys[j + 2 * e, d] * qa[d]
            z += keys[j + 3 * e, d] * qa[d]
        oa[j], oa[j + e], oa[j + 2 * e], oa[j + 3 * e] = w * scale, x * scale, y * scale, z * scale
    for j in range(4 * e, keys.shape[0]):
        w = np.float32(0)
        for d in range(dim):
            w += keys[j, d] * qa[d]
        oa[j] = w * scale


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _scores3(q, keys, scale, dim, out):  # type: ignore[no-untyped-def]
    """The same for three query heads at once, q (3, d), out (3, keys)."""
    qa, qb, qc = q[0], q[1], q[2]
    oa, ob, oc = out[0], out[1], out[2]
    e = keys.shape[0] // 4
    for j in range(e):
        w0, w1, w2 = np.float32(0), np.float32(0), np.float32(0)
        x0, x1, x2 = np.float32(0), np.float32(0), np.float32(0)
        y0, y1, y2 = np.float32(0), np.float32(0), np.float32(0)
        z0, z1, z2 = np.float32(0), np.float32(0), np.float32(0)
        for d in range(dim):
            w, x, y, z = keys[j, d], keys[j + e, d], keys[j + 2 * e, d], keys[j + 3 * e, d]
            w0 += w * qa[d]
            w1 += w * qb[d]
            w2 += w * qc[d]
            x0 += x * qa[d]
            x1 += x * qb[d]
            x2 += x * qc[d]
            y0 += y * qa[d]
            y1 += y * qb[d]
            y2 += y * qc[d]
            z0 += z * qa[d]
            z1 += z * qb[d]
            z2 += z * qc[d]
        oa[j], oa[j + e], oa[j + 2 * e], oa[j + 3 * e] = w0 * scale, x0 * scale, y0 * scale, z0 * scale
        ob[j], ob[j + e], ob[j + 2 * e], ob[j + 3 * e] = w1 * scale, x1 * scale, y1 * scale, z1 * scale
        oc[j], oc[j + e], oc[j + 2 * e], oc[j + 3 * e] = w2 * scale, x2 * scale, y2 * scale, z2 * scale
    for j in range(4 * e, keys.shape[0]):
        w0, w1, w2 = np.float32(0), np.float32(0), np.float32(0)
        for d in range(dim):
            w = keys[j, d]
            w0 += w * qa[d]
            w1 += w * qb[d]
            w2 += w * qc[d]
        oa[j], ob[j], oc[j] = w0 * scale, w1 * scale, w2 * scale


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _weigh1(p, values, dim, out):  # type: ignore[no-untyped-def]
    """Add p-weighted values to out for one head, p (1, keys), out (1, d)."""
    pa, oa = p[0], out[0]
    e = values.shape[0] // 4
    for j in range(e):
        x0, x1, x2, x3 = pa[j], pa[j + e], pa[j + 2 * e], pa[j + 3 * e]
        for d in range(dim):
            left = x0 * values[j, d] + x1 * values[j + e, d]
            oa[d] += left + (x2 * values[j + 2 * e, d] + x3 * values[j + 3 * e, d])
    for j in range(4 * e, values.shape[0]):
        for d in range(dim):
            oa[d] += pa[j] * values[j, d]


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _weigh3(p, values, dim, out):  # type: ignore[no-untyped-def]
    """The same for three heads at once, p (3, keys), out (3, d)."""
    pa, pb, pc = p[0], p[1], p[2]
    oa, ob, oc = out[0], out[1], out[2]
    e = values.shape[0] // 4
    for j in range(e):
        x0, x1, x2, x3 = pa[j], pa[j + e], pa[j + 2 * e], pa[j + 3 * e]
        y0, y1, y2, y3 = pb[j], pb[j + e], pb[j + 2 * e], pb[j + 3 * e]
        z0, z1, z2, z3 = pc[j], pc[j + e], pc[j + 2 * e], pc[j + 3 * e]
        for d in range(dim):
            v0, v1, v2, v3 = values[j, d], values[j + e, d], values[j + 2 * e, d], values[j + 3 * e, d]
            oa[d] += (x0 * v0 + x1 * v1) + (x2 * v2 + x3 * v3)
            ob[d] += (y0 * v0 + y1 * v1) + (y2 * v2 + y3 * v3)
            oc[d] += (z0 * v0 + z1 * v1) + (z2 * v2 + z3 * v3)
    for j in range(4 * e, values.shape[0]):
        for d in range(dim):
            v0 = values[j, d]
            oa[d] += pa[j] * v0
            ob[d] += pb[j] * v0
            oc[d] += pc[j] * v0


@numba.njit(fastmath=FASTMATH, forceinline=True)
def _softmax(score, state):  # type: ignore[no-untyped-def]
    """Turn the scores of one head over a split into exp(score - max); write (max, sum) to state."""
    highest = np.float32(-np.inf)
    for j in range(score.shape[0]):
        highest = max(highest, score[j])
    total = np.float32(0)
    for j in range(score.shape[0]):
        e = exp32(score[j] - highest)
        score[j] = e
        total += e
    state[0] = highest
    state[1] = total


@functools.cache
def _build(group: int, dim: int) -> Callable[..., None]:
    """Compile for one group size and head dimension: constant trip counts let LLVM keep a query row in registers.

    The closure holds integers only, so that the on-disk cache of compiled code finds it again in the next process.
    With `append` the call starts with `rope_append`, whose arguments come after those of attention.
    """

    threes = group // 3 * 3

    @numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
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
            partial[program] = np.float32(0)
            state[program, :, 0] = np.float32(-np.inf)
            state[program, :, 1] = np.float32(0)
            if low < high:
                k, v = keys[h, low:high], values[h, low:high]
                q, p = query[h * group : (h + 1) * group], np.empty((group, high - low), dtype=np.float32)
                for g in range(0, threes, 3):
                    _scores3(q[g : g + 3], k, scale, dim, p[g : g + 3])
                for g in range(threes, group):
                    _scores1(q[g : g + 1], k, scale, dim, p[g : g + 1])
                for g in range(group):
                    _softmax(p[g], state[program, g])
                for g in range(0, threes, 3):
                    _weigh3(p[g : g + 3], v, dim, partial[program, g : g + 3])
                for g in range(threes, group):
                    _weigh1(p[g : g + 1], v, dim, partial[program, g : g + 1])
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
    query = scratch("query", (heads, dim))
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
        scratch("partial", (programs, group, dim)),
        scratch("state", (programs, group, 2)),
        array("out", out).reshape(heads, dim),
        *rope,
    )
