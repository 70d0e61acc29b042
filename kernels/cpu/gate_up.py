"""Fused gate and up projections with SiLU, dense (output-major) and sparse (input-major).

A thread owns a range of the intermediate channels and computes gate and up for it, so the product needs no second
pass and no second launch.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import EXACT, FASTMATH, PRANGE, array, divide, exp32, integers, norm_arrays, normed, scratch
from kernels.cpu.sparse_gemv import add_parts, lists, part_sums, parts_of, select_segments
from kernels.norm import Norm
from kernels.selection import Selection


@numba.njit(fastmath={"contract"})
def _silu_product(gate, up, act, low, high):  # type: ignore[no-untyped-def]
    for n in range(low, high):
        g = gate[n]
        act[n] = g / (np.float32(1) + exp32(-g)) * up[n]


@numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
def _dense(raw, gain, eps, room, w, gate, up, act, parts):  # type: ignore[no-untyped-def]
    x = normed(raw, gain, eps, room)
    depth, width = x.shape[0], act.shape[0]
    for p in numba.prange(parts.shape[0]):
        low, high = parts[p, 0], parts[p, 1]
        full = low + (high - low) // 2 * 2
        for n in range(low, full, 2):
            g0, g1, u0, u1 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for k in range(depth):
                xk = x[k]
                g0 += w[n, k] * xk
                g1 += w[n + 1, k] * xk
                u0 += w[width + n, k] * xk
                u1 += w[width + n + 1, k] * xk
            gate[n], gate[n + 1], up[n], up[n + 1] = g0, g1, u0, u1
        for n in range(full, high):
            g0, u0 = np.float32(0), np.float32(0)
            for k in range(depth):
                g0 += w[n, k] * x[k]
                u0 += w[width + n, k] * x[k]
            gate[n], up[n] = g0, u0
        _silu_product(gate, up, act, low, high)


@numba.njit(parallel=PRANGE, fastmath=EXACT, cache=True)
def _sparse(  # type: ignore[no-untyped-def]
    raw, gain, eps, room, w, thresholds, segments, act, kept, index, value, sums
):
    parts, width = sums.shape[0], act.shape[0]
    x = normed(raw, gain, eps, room)
    found = select_segments(x, thresholds, segments, kept, index, value)
    for p in numba.prange(parts):
        part_sums(index, value, found, w, p, parts, sums[p])
    total = add_parts(sums)
    _silu_product(total[:width], total[width:], act, 0, width)


def _parts(width: int) -> np.ndarray:
    return integers(*divide(width, numba.get_num_threads()))


def bind(x: torch.Tensor, w: torch.Tensor, act: torch.Tensor, norm: Norm | None) -> Launch:
    """Bind the dense form; shapes are checked by `kernels.gate_up.bind`."""
    width = act.shape[0]
    gate, up = scratch("gate", (width,)), scratch("up", (width,))
    return functools.partial(
        _dense, array("x", x), *norm_arrays(norm), array("w", w), gate, up, array("act", act), _parts(width)
    )


def bind_sparse(
    x: torch.Tensor, w_in: torch.Tensor, act: torch.Tensor, selection: Selection, norm: Norm | None
) -> Launch:
    """Bind the thresholded form; shapes are checked by `kernels.gate_up.bind_sparse`."""
    return functools.partial(
        _sparse,
        array("x", x),
        *norm_arrays(norm),
        array("w_in", w_in),
        array("thresholds", selection.thresholds),
        integers(*selection.segments),
        array("act", act),
        array("kept", selection.kept, torch.int32),
        *lists(w_in.shape[0], len(selection.segments) - 1),
        scratch("sums", (parts_of(w_in.shape[0]), w_in.shape[1])),
    )
