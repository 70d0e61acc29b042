"""Dense product of a batch on output-major weights: two rows times four sequences share their loads.

A row stays in the first-level cache while all sequences use it, so memory sees every weight once.
"""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import FASTMATH, PRANGE, array, divide, integers, norm_arrays, optional, scratch
from kernels.norm import Norm


@numba.njit(fastmath=FASTMATH)
def normed_rows(x, gain, eps, out):  # type: ignore[no-untyped-def]
    """Return x (B, K), or `out` holding the RMSNorm of every row when there is a gain."""
    if gain.shape[0] == 0:
        return x
    for b in range(x.shape[0]):
        squares = np.float32(0)
        for i in range(x.shape[1]):
            squares += x[b, i] * x[b, i]
        factor = np.float32(1) / np.sqrt(squares / np.float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            out[b, i] = x[b, i] * factor * gain[i]
    return out


@numba.njit(fastmath=FASTMATH)
def _four(x, b, w, n, depth, out):  # type: ignore[no-untyped-def]
    """Set out (2, B) columns b .. b + 3 to the products of rows n and n + 1."""
    xa, xb, xc, xd = x[b], x[b + 1], x[b + 2], x[b + 3]
    u, v = w[n], w[n + 1]
    a0, b0, c0, d0 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    a1, b1, c1, d1 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for k in range(depth):
        uk, vk = u[k], v[k]
        a0 += uk * xa[k]
        b0 += uk * xb[k]
        c0 += uk * xc[k]
        d0 += uk * xd[k]
        a1 += vk * xa[k]
        b1 += vk * xb[k]
        c1 += vk * xc[k]
        d1 += vk * xd[k]
    out[0, b], out[0, b + 1], out[0, b + 2], out[0, b + 3] = a0, b0, c0, d0
    out[1, b], out[1, b + 1], out[1, b + 2], out[1, b + 3] = a1, b1, c1, d1


@numba.njit(fastmath=FASTMATH)
def _one(x, b, w, n, depth, out):  # type: ignore[no-untyped-def]
    """Set out (2, B) column b to the products of rows n and n + 1."""
    s0, s1 = np.float32(0), np.float32(0)
    for k in range(depth):
        s0 += w[n, k] * x[b, k]
        s1 += w[n + 1, k] * x[b, k]
    out[0, b], out[1, b] = s0, s1


@numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
def _batched_gemv(raw, gain, eps, room, w, bias, y, add, parts):  # type: ignore[no-untyped-def]
    x = normed_rows(raw, gain, eps, room)
    batch, depth = x.shape
    fours = batch // 4 * 4
    for p in numba.prange(parts.shape[0]):
        low, high = parts[p, 0], parts[p, 1]
        out = np.empty((2, batch), dtype=np.float32)
        for n in range(low, high, 2):
            first = min(n, high - 2) if high - low > 1 else n
            if high - low > 1:
                for b in range(0, fours, 4):
                    _four(x, b, w, first, depth, out)
                for b in range(fours, batch):
                    _one(x, b, w, first, depth, out)
            else:
                for b in range(batch):
                    s0 = np.float32(0)
                    for k in range(depth):
                        s0 += w[n, k] * x[b, k]
                    out[0, b] = s0
            for r in range(n - first, min(2, high - first)):
                shift = bias[first + r] if bias.shape[0] > 0 else np.float32(0)
                for b in range(batch):
                    value = out[r, b] + shift
                    y[b, first + r] = y[b, first + r] + value if add else value


def bind(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    accumulate: bool,
) -> Launch:
    """Bind the product of a batch; shapes are checked by `kernels.batched_gemv.bind`."""
    return functools.partial(
        _batched_gemv,
        array("x", x),
        *row_norm_arrays(norm, x.shape[0]),
        array("w", w),
        optional("bias", bias),
        array("y", y),
        accumulate,
        integers(*divide(w.shape[0], numba.get_num_threads())),
    )


def row_norm_arrays(norm: Norm | None, batch: int) -> tuple[np.ndarray, np.float32, np.ndarray]:
    """Return gain, eps and scratch (B, K) as `normed_rows` takes them."""
    gain, eps, _ = norm_arrays(norm)
    return gain, eps, scratch("normed", (batch, gain.shape[0]))
