"""Sparse product of a batch on input-major weights: list the union of active channels, then add its rows four at a
time to the sums of the sequences that use them.

As in the kernel of a single sequence, the list is cut into parts that depend on K alone and their sums are added in
order, so that results do not depend on the number of threads. Columns are taken in blocks that stay in the first-level
cache while all sequences use them: memory sees every row of the union once.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.batched_gemv import normed_rows, row_norm_arrays
from kernels.cpu.common import EXACT, PRANGE, array, integers, optional, scratch
from kernels.cpu.sparse_gemv import lists, parts_of, run_of, set_run
from kernels.norm import Norm
from kernels.selection import Selection

BLOCK = 768  # columns: four rows of them are 12 KB


@numba.njit(fastmath=EXACT)
def select_union(x, threshold, index, value):  # type: ignore[no-untyped-def]
    """List the channels that any row of x (B, K) activates: their numbers in `index`, and in value (., B) what each
    sequence multiplies them by, 0 where it does not activate them. NaN is active. Returns how many there are.
    """
    batch, depth = x.shape
    count = 0
    for i in range(depth):
        active = False
        for b in range(batch):
            v = x[b, i]
            mine = not (abs(v) <= threshold)
            value[count, b] = v if mine else np.float32(0)
            active |= mine
        index[count] = i
        if active:
            count += 1
    return count


@numba.njit(fastmath=EXACT)
def accumulate_union(index, value, first, last, w, low, high, sums):  # type: ignore[no-untyped-def]
    """Set sums[:, low:high] to the products of the listed channels first:last."""
    sums[:, low:high] = np.float32(0)
    full = first + (last - first) // 4 * 4
    for p in range(first, full, 4):
        for start in range(low, high, BLOCK):
            end = min(high, start + BLOCK)
            w0, w1 = w[index[p], start:end], w[index[p + 1], start:end]
            w2, w3 = w[index[p + 2], start:end], w[index[p + 3], start:end]
            for b in range(sums.shape[0]):
                v0, v1, v2, v3 = value[p, b], value[p + 1, b], value[p + 2, b], value[p + 3, b]
                out = sums[b, start:end]
                for j in range(end - start):
                    out[j] += (v0 * w0[j] + v1 * w1[j]) + (v2 * w2[j] + v3 * w3[j])
    for p in range(full, last):
        row = w[index[p], low:high]
        for b in range(sums.shape[0]):
            v, out = value[p, b], sums[b, low:high]
            for j in range(high - low):
                out[j] += v * row[j]


@numba.njit(fastmath=EXACT)
def _count_own(x, thresholds, own):  # type: ignore[no-untyped-def]
    for b in range(x.shape[0]):
        for s in range(thresholds.shape[0]):
            count = 0
            for i in range(x.shape[1]):
                if not (abs(x[b, i]) <= thresholds[s]):
                    count += 1
            own[b, s] = count


@numba.njit(parallel=PRANGE, fastmath=EXACT, cache=True)
def _batched_sparse_gemv(  # type: ignore[no-untyped-def]
    raw, gain, eps, room, w, thresholds, segments, bias, y, add, kept, own, index, value, sums
):
    parts, batch = sums.shape[0], sums.shape[1]
    x = normed_rows(raw, gain, eps, room)
    found, s = 0, 0
    while s < thresholds.shape[0]:
        end = s + 1
        while end < thresholds.shape[0] and thresholds[end] == thresholds[s]:
            end += 1
        count = select_union(x, thresholds[s], index[found], value[found])
        kept[s:end] = count
        set_run(index[found], x.shape[1], count, segments[s], segments[end])
        found += 1
        s = end
    for p in numba.prange(parts):
        for r in range(found):
            count, low, high = run_of(index[r])
            first, last = count * p // parts, count * (p + 1) // parts
            accumulate_union(index[r], value[r], first, last, w, low, high, sums[p])
    for b in numba.prange(batch):
        total = sums[0, b]
        for p in range(1, parts):
            for n in range(total.shape[0]):
                total[n] += sums[p, b, n]
        for n in range(bias.shape[0]):
            total[n] += bias[n]
        for n in range(total.shape[0]):
            y[b, n] = y[b, n] + total[n] if add else total[n]
    _count_own(x, thresholds, own)


def bind(
    x: torch.Tensor,
    w_in: torch.Tensor,
    y: torch.Tensor,
    selection: Selection,
    own: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    accumulate: bool,
) -> Launch:
    """Bind the thresholded product of a batch; shapes are checked by `kernels.batched_sparse_gemv.bind`."""
    batch = x.shape[0]
    depth, columns = w_in.shape
    return functools.partial(
        _batched_sparse_gemv,
        array("x", x),
        *row_norm_arrays(norm, batch),
        array("w_in", w_in),
        array("thresholds", selection.thresholds),
        integers(*selection.segments),
        optional("bias", bias),
        array("y", y),
        accumulate,
        array("kept", selection.kept, torch.int32),
        array("own", own, torch.int32),
        *lists(depth, len(selection.segments) - 1, (batch,)),
        scratch("sums", (parts_of(depth), batch, columns)),
    )
