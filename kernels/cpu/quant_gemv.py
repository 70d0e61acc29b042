"""Products on 8- and 4-bit weights: codes become float32 in registers, scales are applied once per output or group.

As in the float32 kernels, the dense form divides outputs over threads, and the sparse one cuts its channels into parts
that depend on K alone and adds their sums in order, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import EXACT, FASTMATH, PRANGE, array, divide, integers, norm_arrays, normed, optional, scratch
from kernels.cpu.sparse_gemv import add_parts, lists, parts_of, run_of, select_segments
from kernels.norm import Norm
from kernels.quantised import GROUP, HALF, Quantised
from kernels.selection import Selection


@numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
def _dense8(raw, gain, eps, room, q, scales, bias, y, add, parts):  # type: ignore[no-untyped-def]
    x = normed(raw, gain, eps, room)
    depth = x.shape[0]
    for p in numba.prange(parts.shape[0]):
        low, high = parts[p, 0], parts[p, 1]
        full = low + (high - low) // 4 * 4
        for n in range(low, full, 4):
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for k in range(depth):
                xk = x[k]
                s0 += np.float32(q[n, k]) * xk
                s1 += np.float32(q[n + 1, k]) * xk
                s2 += np.float32(q[n + 2, k]) * xk
                s3 += np.float32(q[n + 3, k]) * xk
            _put(y, n, s0 * scales[n], bias, add)
            _put(y, n + 1, s1 * scales[n + 1], bias, add)
            _put(y, n + 2, s2 * scales[n + 2], bias, add)
            _put(y, n + 3, s3 * scales[n + 3], bias, add)
        for n in range(full, high):
            s0 = np.float32(0)
            for k in range(depth):
                s0 += np.float32(q[n, k]) * x[k]
            _put(y, n, s0 * scales[n], bias, add)


@numba.njit(fastmath=EXACT, forceinline=True)
def _put(y, n, value, bias, add):  # type: ignore[no-untyped-def]
    if bias.shape[0] > 0:
        value += bias[n]
    y[n] = y[n] + value if add else value


@numba.njit(fastmath=EXACT)
def _add8(index, value, first, last, q, low, high, sums):  # type: ignore[no-untyped-def]
    """Set sums[low:high] to the sum over the listed channels first:last of value times their codes."""
    out = sums[low:high]
    width = high - low
    out[:] = np.float32(0)
    full = first + (last - first) // 8 * 8
    for p in range(first, full, 8):
        a, b, c, d = (
            q[index[p], low:high],
            q[index[p + 1], low:high],
            q[index[p + 2], low:high],
            q[index[p + 3], low:high],
        )
        e, f, g, h = (
            q[index[p + 4], low:high], q[index[p + 5], low:high], q[index[p + 6], low:high], q[index[p + 7], low:high],
        )  # fmt: skip
        v0, v1, v2, v3 = value[p], value[p + 1], value[p + 2], value[p + 3]
        v4, v5, v6, v7 = value[p + 4], value[p + 5], value[p + 6], value[p + 7]
        for j in range(width):
            left = (v0 * np.float32(a[j]) + v1 * np.float32(b[j])) + (v2 * np.float32(c[j]) + v3 * np.float32(d[j]))
            right = (v4 * np.float32(e[j]) + v5 * np.float32(f[j])) + (v6 * np.float32(g[j]) + v7 * np.float32(h[j]))
            out[j] += left + right
    for p in range(full, last):
        row, v = q[index[p], low:high], value[p]
        for j in range(width):
            out[j] += v * np.float32(row[j])


@numba.njit(fastmath=EXACT)
def _add_codes(v0, v1, v2, v3, a, b, c, d, low, high):  # type: ignore[no-untyped-def]
    """Add the values times the codes of four packed rows to the sums of the codes in the low and in the high halves."""
    for j in range(low.shape[0]):
        p, q, r, s = np.int32(a[j]), np.int32(b[j]), np.int32(c[j]), np.int32(d[j])
        left = (v0 * np.float32(p & 15) + v1 * np.float32(q & 15)) + (v2 * np.float32(r & 15) + v3 * np.float32(s & 15))
        right = (v0 * np.float32(p >> 4) + v1 * np.float32(q >> 4)) + (
            v2 * np.float32(r >> 4) + v3 * np.float32(s >> 4)
        )
        low[j] += left
        high[j] += right


@numba.njit(fastmath=EXACT)
def _scale(scale, low, high, offset, out):  # type: ignore[no-untyped-def]
    """Add a group's sums to out: byte j of a block of 32 holds outputs j and 32 + j, and codes are 8 too large."""
    for block in range(out.shape[0] // GROUP):
        n, m = block * GROUP, block * HALF
        for j in range(HALF):
            out[n + j] += scale[n + j] * (low[m + j] - offset)
        for j in range(HALF):
            out[n + HALF + j] += scale[n + HALF + j] * (high[m + j] - offset)


@numba.njit(fastmath=EXACT)
def _add4(index, value, count, first, last, q, scales, start, stop, halves, sums):  # type: ignore[no-untyped-def]
    """Set sums[start:stop] to the products of the listed channels that lie in groups first:last, group by group.

    Four channels are added at a time; the last of a group are filled up with zeros.
    """
    out, width = sums[start:stop], (stop - start) // 2
    out[:] = np.float32(0)
    low, high = halves[0, :width], halves[1, :width]
    rows = q[:, start // 2 : stop // 2]
    p = 0
    while p < count and index[p] < first * GROUP:
        p += 1
    for g in range(first, last):
        end = p
        while end < count and index[end] < (g + 1) * GROUP:
            end += 1
        if end == p:
            continue
        low[:] = np.float32(0)
        high[:] = np.float32(0)
        total = np.float32(0)
        while p < end:
            i1, i2, i3 = min(p + 1, end - 1), min(p + 2, end - 1), min(p + 3, end - 1)
            v0 = value[p]
            v1 = value[i1] if p + 1 < end else np.float32(0)
            v2 = value[i2] if p + 2 < end else np.float32(0)
            v3 = value[i3] if p + 3 < end else np.float32(0)
            _add_codes(v0, v1, v2, v3, rows[index[p]], rows[index[i1]], rows[index[i2]], rows[index[i3]], low, high)
            total += (v0 + v1) + (v2 + v3)
            p += 4
        p = end
        _scale(scales[g, start:stop], low, high, np.float32(8) * total, out)


@numba.njit(parallel=PRANGE, fastmath=EXACT, cache=True)
def _sparse(  # type: ignore[no-untyped-def]
    raw, gain, eps, room, four, q, scales, thresholds, segments, bias, y, add, kept, index, value, sums, halves
):
    parts = sums.shape[0]
    x = normed(raw, gain, eps, room)
    groups = x.shape[0] // GROUP
    found = select_segments(x, thresholds, segments, kept, index, value)
    for p in numba.prange(parts):
        for r in range(found):
            count, low, high = run_of(index[r])
            if four:
                first, last = groups * p // parts, groups * (p + 1) // parts
                _add4(index[r], value[r], count, first, last, q, scales, low, high, halves[p], sums[p])
            else:
                _add8(index[r], value[r], count * p // parts, count * (p + 1) // parts, q, low, high, sums[p])
    total = add_parts(sums)
    for n in range(total.shape[0]):
        result = total[n] if four else total[n] * scales[0, n]
        _put(y, n, result, bias, add)


def bind(
    x: torch.Tensor,
    weight: Quantised,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    accumulate: bool,
) -> Launch:
    """Bind the dense product; shapes are checked by `kernels.quant_gemv.bind`.

    In 4 bits it is the thresholded one with nothing below its threshold: adding whole rows needs no sum across a
    register, which unpacked codes are too short for.
    """
    if weight.bits == 4:
        every = Selection(torch.tensor([-1.0]), (0, weight.outputs), torch.zeros(1, dtype=torch.int32))
        return bind_sparse(x, weight, y, every, bias, norm, accumulate)
    return functools.partial(
        _dense8,
        array("x", x),
        *norm_arrays(norm),
        array("q", weight.q, torch.int8),
        array("scales", weight.scales),
        optional("bias", bias),
        array("y", y),
        accumulate,
        integers(*divide(weight.outputs, numba.get_num_threads())),
    )


def bind_sparse(
    x: torch.Tensor,
    weight: Quantised,
    y: torch.Tensor,
    selection: Selection,
    bias: torch.Tensor | None,
    norm: Norm | None,
    accumulate: bool,
) -> Launch:
    """Bind the thresholded product; shapes are checked by `kernels.quant_gemv.bind_sparse`."""
    four = weight.bits == 4
    parts = parts_of(weight.inputs)
    return functools.partial(
        _sparse,
        array("x", x),
        *norm_arrays(norm),
        four,
        array("q_in", weight.q_in, torch.uint8 if four else torch.int8),
        array("scales", weight.scales).reshape(-1, weight.outputs),
        array("thresholds", selection.thresholds),
        integers(*selection.segments),
        optional("bias", bias),
        array("y", y),
        accumulate,
        array("kept", selection.kept, torch.int32),
        *lists(weight.inputs, len(selection.segments) - 1),
        scratch("sums", (parts, weight.outputs)),
        scratch("halves", (parts, 2, weight.outputs // 2 if four else 0)),
    )
