"""Ragged decode attention on the CPU: splits of SPLIT entries, numbered over all heads, so that threads share what the
heads really hold.

A split reads one run of rows, or the runs of its pages; its arithmetic is that of `kernels.cpu.attention`. The split
of an entry does not depend on the thread count, and partial results are combined in split order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.attention import _scores1, _scores3, _softmax, _weigh1, _weigh3
from kernels.cpu.common import FASTMATH, PRANGE, array, exp32, scratch
from kernels.ragged import SPLIT, Pages


@numba.njit(fastmath=FASTMATH)
def first_splits(lengths, counts, page, first):  # type: ignore[no-untyped-def]
    """Write to first[h] the number of the first split of head h; first[heads] is their total."""
    total = 0
    for h in range(lengths.shape[0]):
        first[h] = total
        entries = lengths[h] + 1 if counts[h] < 0 else counts[h] * page
        total += (entries + SPLIT - 1) // SPLIT
    first[lengths.shape[0]] = total
    return total


@numba.njit(fastmath=FASTMATH)
def combine(partial, state, begin, end, g, dim, row):  # type: ignore[no-untyped-def]
    """Merge the splits begin .. end - 1 of one query head into row (d,), in order."""
    highest = np.float32(-np.inf)
    for s in range(begin, end):
        highest = max(highest, state[s, g, 0])
    total = np.float32(0)
    row[:] = np.float32(0)
    for s in range(begin, end):
        weight = exp32(state[s, g, 0] - highest)
        total += weight * state[s, g, 1]
        for d in range(dim):
            row[d] += weight * partial[s, g, d]
    for d in range(dim):
        row[d] /= total


@functools.cache
def _build(group: int, dim: int) -> Callable[..., None]:
    """Compile for one group size and head dimension, as `kernels.cpu.attention` does."""
    threes = group // 3 * 3

    @numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
    def ragged(  # type: ignore[no-untyped-def]
        query, keys, values, offsets, lengths, scale, chosen, counts, page, first, partial, state, out
    ):
        kv_heads = lengths.shape[0]
        for program in numba.prange(first_splits(lengths, counts, page, first)):
            h = 0
            while first[h + 1] <= program:
                h += 1
            low = (program - first[h]) * SPLIT
            whole = counts[h] < 0
            runs = 1 if whole else min(SPLIT // page, counts[h] - low // page)
            q, p = query[h * group : (h + 1) * group], np.empty((group, SPLIT), dtype=np.float32)
            partial[program] = np.float32(0)
            seen = 0
            for run in range(runs):
                begin = low if whole else chosen[h, low // page + run] * page
                end = min(lengths[h] + 1, begin + (SPLIT if whole else page))
                k = keys[offsets[h] + begin : offsets[h] + end]
                for g in range(0, threes, 3):
                    _scores3(q[g : g + 3], k, scale, dim, p[g : g + 3, seen : seen + end - begin])
                for g in range(threes, group):
                    _scores1(q[g : g + 1], k, scale, dim, p[g : g + 1, seen : seen + end - begin])
                seen += end - begin
            for g in range(group):
                _softmax(p[g, :seen], state[program, g])
            seen = 0
            for run in range(runs):
                begin = low if whole else chosen[h, low // page + run] * page
                end = min(lengths[h] + 1, begin + (SPLIT if whole else page))
                v = values[offsets[h] + begin : offsets[h] + end]
                for g in range(0, threes, 3):
                    _weigh3(p[g : g + 3, seen : seen + end - begin], v, dim, partial[program, g : g + 3])
                for g in range(threes, group):
                    _weigh1(p[g : g + 1, seen : seen + end - begin], v, dim, partial[program, g : g + 1])
                seen += end - begin
        for head in range(kv_heads * group):
            h = head // group
            combine(partial, state, first[h], first[h + 1], head % group, dim, out[head])

    return ragged


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    capacity: int,
    pages: Pages | None,
) -> Launch:
    """Bind ragged attention; shapes are checked by `kernels.ragged.bind`."""
    heads, dim = query.shape
    kv_heads = lengths.shape[0]
    splits = kv_heads + -(-capacity // SPLIT)
    group = heads // kv_heads
    everything = np.full(kv_heads, -1, dtype=np.int32)
    return functools.partial(
        _build(group, dim),
        array("query", query),
        array("keys", keys),
        array("values", values),
        array("offsets", offsets, torch.int64),
        array("lengths", lengths, torch.int32),
        np.float32(scale),
        np.zeros((kv_heads, 1), dtype=np.int32) if pages is None else array("chosen", pages.chosen, torch.int32),
        everything if pages is None else array("counts", pages.counts, torch.int32),
        SPLIT if pages is None else pages.size,
        scratch("bounds", (kv_heads + 1,), np.int64),
        scratch("partial", (splits, group, dim)),
        scratch("state", (splits, group, 2)),
        array("out", out).reshape(heads, dim),
    )
