"""Page selection on the CPU, parallel over KV heads: bounds, scores and a stable sort of a few hundred numbers."""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import EXACT, PRANGE, array
from kernels.pages import Bounds
from kernels.ragged import Pages


@numba.njit(fastmath=EXACT)
def _bound(query, low, high):  # type: ignore[no-untyped-def]
    """Largest upper bound over the query heads of a group."""
    best = np.float32(-np.inf)
    for g in range(query.shape[0]):
        total = np.float32(0)
        for c in range(query.shape[1]):
            total += max(query[g, c] * low[c], query[g, c] * high[c])
        best = max(best, total)
    return best


@numba.njit(parallel=PRANGE, fastmath=EXACT, cache=True)
def _choose(  # type: ignore[no-untyped-def]
    query, keys, offsets, lengths, lows, highs, page_offsets, budgets, chosen, counts, attended, size
):
    kv_heads = lengths.shape[0]
    group = query.shape[0] // kv_heads
    for h in numba.prange(kv_heads):
        last = lengths[h] // size
        key, row = keys[offsets[h] + lengths[h]], page_offsets[h] + last
        for c in range(key.shape[0]):
            fresh = lengths[h] % size == 0
            lows[row, c] = key[c] if fresh else min(lows[row, c], key[c])
            highs[row, c] = key[c] if fresh else max(highs[row, c], key[c])
        if budgets[h] < 0:
            counts[h] = -1
            attended[h] = lengths[h]
        else:
            taken = min(budgets[h], last + 1)
            scores = np.empty(last + 1, dtype=np.float32)
            for p in range(last):
                at = page_offsets[h] + p
                scores[p] = -_bound(query[h * group : (h + 1) * group], lows[at], highs[at])
            scores[last] = np.float32(-np.inf)
            chosen[h, :taken] = np.sort(np.argsort(scores, kind="mergesort")[:taken])
            counts[h] = taken
            attended[h] = (taken - 1) * size + lengths[h] - last * size + last + 1


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    bounds: Bounds,
    budgets: torch.Tensor,
    pages: Pages,
    attended: torch.Tensor,
) -> Launch:
    """Bind the choice of pages; shapes are checked by `kernels.pages.bind`."""
    return functools.partial(
        _choose,
        array("query", query),
        array("keys", keys),
        array("offsets", offsets, torch.int64),
        array("lengths", lengths, torch.int32),
        array("lows", bounds.lows),
        array("highs", bounds.highs),
        array("page offsets", bounds.offsets, torch.int64),
        array("budgets", budgets, torch.int32),
        array("chosen", pages.chosen, torch.int32),
        array("counts", pages.counts, torch.int32),
        array("attended", attended, torch.int32),
        pages.size,
    )
