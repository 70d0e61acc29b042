"""What the Numba kernels share: compiler flags, the vectorisable exponential, the division of outputs over threads."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.cpu import ParallelOptions
from numba.extending import intrinsic

from kernels import ShapeError
from kernels.norm import Norm

# Reassociation lets LLVM vectorise dot products. The flags that assume finite numbers stay off: NaN and inf must
# propagate.
FASTMATH = {"reassoc", "contract", "nsz"}
EXACT = {"contract", "nsz"}  # sums in the order written
# What runs in parallel is written as prange. By default an array assignment between such loops becomes a parallel loop
# of its own, which costs 2 microseconds: clearing nine rows one by one made up most of a short attention call.
# An object, not the dictionary that Numba's manual shows: Numba empties that at the first compilation and gives every
# later one the defaults.
PRANGE: Any = ParallelOptions(
    {
        name: name == "prange"
        for name in ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion", "prange")
    }
)
LANES = 16  # outputs per thread are a multiple of one AVX-512 register of float32


@intrinsic
def exp32(_typing, value):  # type: ignore[no-untyped-def]
    """Exponential in float32 within 2 ulp, for x in [-87, 88] (clamped outside); branch-free, so loops over it
    vectorise.

    Range reduction by the rounding constant 1.5 * 2**23 and Cody-Waite splitting of ln 2, then a degree-5 polynomial.
    NaN stays NaN. Written as instructions because the caller's licence to reassociate would cancel the rounding
    constant, and because a function of its own is inlined when compiled together and called when loaded from the
    cache, which changes the last bit.
    """

    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        single, word = ir.FloatType(), ir.IntType(32)

        def number(constant: float) -> ir.Constant:
            return ir.Constant(single, float(np.float32(constant)))

        x = args[0]
        for sign, limit in (("<", -87.0), (">", 88.0)):
            outside = builder.fcmp_ordered(sign, x, number(limit))
            x = builder.select(outside, number(limit), x)
        shifted = builder.fma(x, number(1.4426950408889634), number(12582912.0))
        n = builder.fsub(shifted, number(12582912.0))
        r = builder.fma(n, number(-0.693359375), x)
        r = builder.fma(n, number(2.12194440e-4), r)
        p = number(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = builder.fma(p, r, number(coefficient))
        p = builder.fadd(builder.fma(builder.fmul(p, r), r, r), number(1.0))
        exponent = builder.shl(builder.bitcast(shifted, word), ir.Constant(word, 23))
        scale = builder.bitcast(builder.add(exponent, ir.Constant(word, 0x3F800000)), single)
        return builder.fmul(p, scale)

    return types.float32(types.float32), generate


@numba.njit(fastmath=FASTMATH)
def normed(x, gain, eps, out):  # type: ignore[no-untyped-def]
    """Return x, or `out` holding its RMSNorm when there is a gain; on one thread, a microsecond per thousand floats."""
    if gain.shape[0] == 0:
        return x
    squares = np.float32(0)
    for i in range(x.shape[0]):
        squares += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(squares / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * gain[i]
    return out


@functools.cache
def scratch(name: str, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Return the array that every launch asking for this name, shape and dtype writes before it reads.

    What lives during one launch is kept once in a process, in cache, not once per layer: sixty layers' own partial
    sums are read from memory. Two launches must therefore not run at the same time, as they never do: each takes all
    threads.
    """
    return np.empty(shape, dtype=dtype)


@functools.cache
def integers(*rows: Any) -> np.ndarray:
    """Return the one int64 array of these numbers, or of these tuples as rows, that all launches read.

    An argument that only one launch uses is fetched anew, its object, shape and data, each time that launch's turn
    comes.
    """
    return np.array(rows, dtype=np.int64)


EMPTY = np.zeros(0, dtype=np.float32)  # stands for what a launch does without


def optional(name: str, tensor: torch.Tensor | None) -> np.ndarray:
    """Return the view of a tensor, or the empty array where there is none."""
    return EMPTY if tensor is None else array(name, tensor)


def norm_arrays(norm: Norm | None) -> tuple[np.ndarray, np.float32, np.ndarray]:
    """Return gain, eps and scratch as `normed` takes them; all empty without a norm."""
    if norm is None:
        return EMPTY, np.float32(0), EMPTY
    return array("norm weight", norm.weight), np.float32(norm.eps), scratch("normed", (norm.weight.shape[0],))


def array(name: str, tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Return a NumPy view of a contiguous CPU tensor, or raise ShapeError naming what is wrong with it."""
    if tensor.dtype != dtype:
        raise ShapeError(f"{name} has dtype {tensor.dtype}, the CPU kernels take {dtype}")
    if not tensor.is_contiguous():
        raise ShapeError(f"{name} of shape {tuple(tensor.shape)} must be contiguous")
    return tensor.detach().numpy()


def divide(columns: int, parts: int, lanes: int = LANES) -> list[tuple[int, int]]:
    """Divide `columns` outputs into at most `parts` contiguous ranges whose inner bounds are multiples of `lanes`."""
    blocks = -(-columns // lanes)
    bounds = [min(columns, blocks * part // parts * lanes) for part in range(parts)] + [columns]
    return [(low, high) for low, high in itertools.pairwise(bounds) if low < high]
