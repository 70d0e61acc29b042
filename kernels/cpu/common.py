"""What the Numba kernels share: compiler flags, the vectorisable exponential, the division of outputs over threads."""

from __future__ import annotations

import os

os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")

import itertools

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels import ShapeError

# Reassociation lets LLVM vectorise dot products. The flags that assume finite numbers stay off: NaN and inf must
# propagate.
FASTMATH = {"reassoc", "contract", "nsz"}
LANES = 16  # outputs per thread are a multiple of one AVX-512 register of float32


@intrinsic
def _float_bits(_typing, value):  # type: ignore[no-untyped-def]
    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def _bits_float(_typing, value):  # type: ignore[no-untyped-def]
    def generate(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@numba.njit(fastmath={"contract"}, cache=True)
def exp32(x):  # type: ignore[no-untyped-def]
    """Exponential in float32 within 2 ulp, for x in [-87, 88] (clamped outside); branch-free, so loops over it
    vectorise.

    Range reduction by the rounding constant 1.5 * 2**23 and Cody-Waite splitting of ln 2, then a degree-5 polynomial.
    NaN stays NaN.
    """
    x = max(x, np.float32(-87.0))
    x = min(x, np.float32(88.0))
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    r = (x - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    scale = _bits_float(np.int32((_float_bits(shifted) << np.int32(23)) + np.int32(0x3F800000)))
    return p * scale


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
