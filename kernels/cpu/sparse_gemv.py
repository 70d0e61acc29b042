"""Sparse GEMV on input-major weights: select, then add the selected rows eight at a time.

The list of selected channels is cut into a number of parts that depends on K alone. A part adds whole rows into sums
of its own, and the sums are added in order at the end: every output is the same sum in the same order for any number
of threads, parts are equally long whatever was selected, and a row is read in one piece. (Dividing the columns over
threads instead reads half rows and lost 15 to 25% of the bandwidth on rows of 2 to 4 KB, because the hardware
prefetcher runs past the end of each piece.) Eight rows in flight hide the latency of rows that lie apart. One thread
selects before the parts begin, in about a microsecond per 800 channels.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import EXACT, PRANGE, array, integers, norm_arrays, normed, optional, scratch
from kernels.norm import Norm
from kernels.selection import Selection


@numba.njit(fastmath=EXACT)
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


@numba.njit(fastmath=EXACT)
def accumulate(index, value, first, last, w, low, high, y):  # type: ignore[no-untyped-def]
    """Set y[low:high] to the sum over the listed channels first:last of value times their weight row."""
    out = y[low:high]
    width = high - low
    out[:] = np.float32(0)
    full = first + (last - first) // 8 * 8
    for p in range(first, full, 8):
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
    for p in range(full, last):
        row, v = w[index[p], low:high], value[p]
        for j in range(width):
            out[j] += v * row[j]


@numba.njit(fastmath=EXACT)
def set_run(index, depth, count, low, high):  # type: ignore[no-untyped-def]
    """Note behind a list of at most `depth` + 1 channels how many they are and which columns they go to."""
    index[depth + 1], index[depth + 2], index[depth + 3] = count, low, high


@numba.njit(fastmath=EXACT)
def run_of(index):  # type: ignore[no-untyped-def]
    """(channels, first column, end column) as `set_run` noted them."""
    end = index.shape[0]
    return index[end - 3], index[end - 2], index[end - 1]


@numba.njit(fastmath=EXACT)
def select_segments(x, thresholds, segments, kept, index, value):  # type: ignore[no-untyped-def]
    """List the channels of each run of neighbouring segments with one threshold; return how many runs there are.

    Run r gets value[r] and index[r], whose last three numbers are (channels, first column, end column). Neighbours of
    equal threshold are one run, so that a row of a fused weight stays one piece. The counts per segment go to `kept`.
    """
    found, s, depth = 0, 0, x.shape[0]
    while s < thresholds.shape[0]:
        end = s + 1
        while end < thresholds.shape[0] and thresholds[end] == thresholds[s]:
            end += 1
        count = select(x, thresholds[s], index[found], value[found])
        for i in range(s, end):
            kept[i] = count
        set_run(index[found], depth, count, segments[s], segments[end])
        found += 1
        s = end
    return found


@numba.njit(fastmath=EXACT)
def part_sums(index, value, found, w, part, parts, sums):  # type: ignore[no-untyped-def]
    """Set sums (N,) to what `part` of `parts` contributes: its share of the channels of every run."""
    for r in range(found):
        count, low, high = run_of(index[r])
        first, last = count * part // parts, count * (part + 1) // parts
        accumulate(index[r], value[r], first, last, w, low, high, sums)


@numba.njit(fastmath=EXACT)
def add_parts(sums):  # type: ignore[no-untyped-def]
    """Return sums[0] (N,), to which the other parts were added in an order that their number, a multiple of four,
    decides.
    """
    parts, columns = sums.shape
    total = sums[0]
    for n in range(columns):
        total[n] = (sums[0, n] + sums[1, n]) + (sums[2, n] + sums[3, n])
    for p in range(4, parts, 4):
        for n in range(columns):
            total[n] += (sums[p, n] + sums[p + 1, n]) + (sums[p + 2, n] + sums[p + 3, n])
    return total


@numba.njit(parallel=PRANGE, fastmath=EXACT, cache=True)
def _sparse_gemv(  # type: ignore[no-untyped-def]
    raw, gain, eps, room, w, thresholds, segments, bias, y, add, kept, index, value, sums
):
    parts = sums.shape[0]
    x = normed(raw, gain, eps, room)
    found = select_segments(x, thresholds, segments, kept, index, value)
    for p in numba.prange(parts):
        part_sums(index, value, found, w, p, parts, sums[p])
    total = add_parts(sums)
    for n in range(bias.shape[0]):
        total[n] += bias[n]
    if add:
        for n in range(y.shape[0]):
            y[n] += total[n]
    else:
        y[:] = total


def parts_of(depth: int) -> int:
    """Parts of the list of channels: the largest power of two with 128 of K channels each, 4 to 64.

    A function of K alone, so that bits do not depend on threads.
    """
    parts = 4
    while parts < 64 and 2 * parts * 128 <= depth:
        parts *= 2
    return parts


def lists(depth: int, segments: int, batch: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return index (S, K + 4) and value (S, K + 1, *batch), the scratch of a selection."""
    return scratch("index", (segments, depth + 4), np.int64), scratch("value", (segments, depth + 1, *batch))


def bind(
    x: torch.Tensor,
    w_in: torch.Tensor,
    y: torch.Tensor,
    selection: Selection,
    bias: torch.Tensor | None,
    norm: Norm | None,
    accumulate: bool,
) -> Launch:
    """Bind the thresholded product; shapes are checked by `kernels.sparse_gemv.bind`."""
    return functools.partial(
        _sparse_gemv,
        array("x", x),
        *norm_arrays(norm),
        array("w_in", w_in),
        array("thresholds", selection.thresholds),
        integers(*selection.segments),
        optional("bias", bias),
        array("y", y),
        accumulate,
        array("kept", selection.kept, torch.int32),
        *lists(w_in.shape[0], len(selection.segments) - 1),
        scratch("sums", (parts_of(w_in.shape[0]), w_in.shape[1])),
    )
