"""Masked up projection: list the rows that the gate keeps, then four of them at a time.

The list is cut into a number of parts that depends on I alone, so rows fall into the same groups, and every sum into
the same order, for any number of threads.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import FASTMATH, PRANGE, array, exp32, norm_arrays, normed, scratch
from kernels.masked_mlp import LowRank
from kernels.norm import Norm


@numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
def _masked_up(  # type: ignore[no-untyped-def]
    gate, raw, gain, eps, room, w, act, limit, kept, gate_b, up_b, down_a, silu, index, low
):
    width, depth, parts = w.shape[0], w.shape[1], low.shape[0]
    threshold, rank = limit[0], gate_b.shape[1]
    for n in range(width):
        g = gate[n]
        for j in range(rank):
            g += gate_b[n, j] * gate[width + j]
        silu[n] = g / (np.float32(1) + exp32(-g))
    count = 0
    for n in range(width):
        act[n] = np.float32(0)
        index[count] = n
        if not (abs(silu[n]) <= threshold):
            count += 1
    kept[0] = count
    x = normed(raw, gain, eps, room)
    for p in numba.prange(parts):
        first, last = count * p // parts, count * (p + 1) // parts
        full = first + (last - first) // 4 * 4
        for q in range(first, full, 4):
            n0, n1, n2, n3 = index[q], index[q + 1], index[q + 2], index[q + 3]
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for k in range(depth):
                xk = x[k]
                s0 += w[n0, k] * xk
                s1 += w[n1, k] * xk
                s2 += w[n2, k] * xk
                s3 += w[n3, k] * xk
            act[n0], act[n1], act[n2], act[n3] = s0, s1, s2, s3
        for q in range(full, last):
            n = index[q]
            s0 = np.float32(0)
            for k in range(depth):
                s0 += w[n, k] * x[k]
            act[n] = s0
        for j in range(rank):
            low[p, j] = np.float32(0)
        for q in range(first, last):
            n = index[q]
            up = act[n]
            for j in range(rank):
                up += up_b[n, j] * gate[width + rank + j]
            act[n] = silu[n] * up
            for j in range(rank):
                low[p, j] += down_a[n, j] * act[n]
    for j in range(rank):
        total = np.float32(0)
        for p in range(parts):
            total += low[p, j]
        act[width + j] = total


def parts_of(width: int) -> int:
    """Parts of the list of kept rows: a power of two, 4 to 64, with 64 rows each where there are so many."""
    parts = 4
    while parts < 64 and 2 * parts * 64 <= width:
        parts *= 2
    return parts


def bind(
    gate: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    act: torch.Tensor,
    limit: torch.Tensor,
    kept: torch.Tensor,
    norm: Norm | None,
    low: LowRank | None,
) -> Launch:
    """Bind the masked up projection; shapes are checked by `kernels.masked_mlp.bind`."""
    width = w.shape[0]
    empty = scratch("factors", (width, 0))
    factors = (empty, empty, empty)
    if low is not None:
        factors = (array("gate_b", low.gate_b), array("up_b", low.up_b), array("down_a", low.down_a))
    return functools.partial(
        _masked_up,
        array("gate", gate),
        array("x", x),
        *norm_arrays(norm),
        array("w", w),
        array("act", act),
        array("limit", limit),
        array("kept", kept, torch.int32),
        *factors,
        scratch("silu", (width,)),
        scratch("index", (width + 1,), np.int64),
        scratch("low", (parts_of(width), factors[0].shape[1])),
    )
