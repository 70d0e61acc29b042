"""Sparse GEMV on input-major weights: select, then add the selected rows eight at a time.

Every thread selects for itself (a pass over K floats costs about a microsecond) and owns a range of columns, so
nothing is shared and each output is the same sum in the same order for any number of threads. Eight rows in flight
hide the latency of rows that lie apart: with random halves skipped the bandwidth is that of the dense kernel.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import FASTMATH, array, divide
from kernels.selection import Selection

# Only contraction: with reassociation LLVM could order additions by vector width, and column ranges would then matter.
EXACT = {"contract", "nsz"}


@numba.njit(fastmath=EXACT, cache=True)
def select(x, threshold, index, value):  # type: ignore[no-untyped-def]
    """Write the channels with |x| > threshold (NaN included) to `index` and `value`; return how many there are."""
    count = 0
    for i in range(x.shape[0]):
        v = x[i]
        index[count] = i
        value[count] = v
        if not (abs(v) <= threshold):
            count += 1
    return count


@numba.njit(fastmath=EXACT, cache=True)
def accumulate(index, value, count, w, low, high, y):  # type: ignore[no-untyped-def]
    """Set y[low:high] to the sum over selected channels of value times their weight row."""
    out = y[low:high]
    width = high - low
    out[:] = np.float32(0)
    full = count // 8 * 8
    for p in range(0, full, 8):
        w0, w1 = w[index[p], low:high], w[index[p + 1], low:high]
        w2, w3 = w[index[p + 2], low:high], w[index[p + 3], low:high]
        w4, w5 = w[index[p + 4], low:high], w[index[p + 5], low:high]
        w6, w7 = w[index[p + 6], low:high], w[index[p + 7], low:high]
        v0, v1, v2, v3 = value[p], value[p + 1], value[p + 2], value[p + 3]
        v4, v5, v6, v7 = value[p + 4], value[p + 5], value[p + 6], value[p + 7]
        for j in range(width):
            left = (v0 * w0[j] + v1 * w1[j]) + (v2 * w2[j] + v3 * w3[j])
            right = (v4 * w4[j] + v5 * w5[j]) + (v6 * w6[j] + v7 * w7[j])
            out[j] += left + right
    for p in range(full, count):
        row, v = w[index[p], low:high], value[p]
        for j in range(width):
            out[j] += v * row[j]


@numba.njit(parallel=True, fastmath=FASTMATH, cache=True)
def _sparse_gemv(x, w, thresholds, segments, bias, y, kept, parts):  # type: ignore[no-untyped-def]
    depth = x.shape[0]
    for p in numba.prange(parts.shape[0]):
        index = np.empty(depth + 1, dtype=np.int64)
        value = np.empty(depth + 1, dtype=np.float32)
        count, chosen = 0, -1
        for s in range(thresholds.shape[0]):
            low, high = max(parts[p, 0], segments[s]), min(parts[p, 1], segments[s + 1])
            if low < high:
                if chosen < 0 or thresholds[s] != thresholds[chosen]:
                    count = select(x, thresholds[s], index, value)
                    chosen = s
                if low == segments[s]:
                    kept[s] = count
                accumulate(index, value, count, w, low, high, y)
        if bias.shape[0] > 0:
            for n in range(parts[p, 0], parts[p, 1]):
                y[n] += bias[n]


def bind(
    x: torch.Tensor, w_in: torch.Tensor, y: torch.Tensor, selection: Selection, bias: torch.Tensor | None = None
) -> Launch:
    """Bind the thresholded product; shapes are checked by `kernels.sparse_gemv.bind`."""
    parts = np.array(divide(w_in.shape[1], numba.get_num_threads()), dtype=np.int64)
    return functools.partial(
        _sparse_gemv,
        array("x", x),
        array("w_in", w_in),
        array("thresholds", selection.thresholds),
        np.array(selection.segments, dtype=np.int64),
        np.zeros(0, dtype=np.float32) if bias is None else array("bias", bias),
        array("y", y),
        array("kept", selection.kept, torch.int32),
        parts,
    )
