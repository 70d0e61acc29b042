"""Dense GEMV on output-major weights: four rows at a time, so that one thread keeps four read streams in flight.

Measured on a 2-core Xeon with 540 MB of weights: 4 streams read 1.1 to 1.3x as fast as one.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import FASTMATH, PRANGE, array, divide, integers, norm_arrays, normed, optional
from kernels.norm import Norm


@numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
def _gemv(raw, gain, eps, room, w, bias, y, add, parts):  # type: ignore[no-untyped-def]
    x = normed(raw, gain, eps, room)
    depth = x.shape[0]
    for p in numba.prange(parts.shape[0]):
        low, high = parts[p, 0], parts[p, 1]
        full = low + (high - low) // 4 * 4
        for n in range(low, full, 4):
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for k in range(depth):
                xk = x[k]
                s0 += w[n, k] * xk
                s1 += w[n + 1, k] * xk
                s2 += w[n + 2, k] * xk
                s3 += w[n + 3, k] * xk
            if add:
                s0, s1, s2, s3 = y[n] + s0, y[n + 1] + s1, y[n + 2] + s2, y[n + 3] + s3
            y[n], y[n + 1], y[n + 2], y[n + 3] = s0, s1, s2, s3
        for n in range(full, high):
            s0 = np.float32(0)
            for k in range(depth):
                s0 += w[n, k] * x[k]
            y[n] = y[n] + s0 if add else s0
        if bias.shape[0] > 0:
            for n in range(low, high):
                y[n] += bias[n]


def bind(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    accumulate: bool,
) -> Launch:
    """Bind y = w n(x) + bias or y += it; shapes are checked by `kernels.gemv.bind`."""
    return functools.partial(
        _gemv,
        array("x", x),
        *norm_arrays(norm),
        array("w", w),
        optional("bias", bias),
        array("y", y),
        accumulate,
        integers(*divide(w.shape[0], numba.get_num_threads())),
    )
