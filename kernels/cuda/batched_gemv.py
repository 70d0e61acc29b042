"""Products of a batch in Triton: sixteen sequences are the rows of a tensor-core product.

So every weight is read once. Weights are half precision, inputs float32. A half keeps eleven bits of an input, so every
input is split into a half and what that leaves, again as a half: two products, 22 bits. Inputs beyond the half's range
do not occur behind a norm; where they do (65,504 and above) the result is not finite and shows. Unused rows of the
sixteen are zero. The thresholded form is in `batched_sparse_gemv.py`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import Launch, ShapeError
from kernels.cuda.common import launcher, overlaps, wait_for_producer
from kernels.cuda.rows import chain, normed
from kernels.norm import Norm

ROWS = 16  # of a tensor-core product


@dataclass(frozen=True)
class Config:
    """Outputs of a program, weights of each read at once, warps, blocks of weights under way."""

    outputs: int
    depth: int
    warps: int
    stages: int


CONFIG = Config(32, 128, 4, 4)


@triton.jit
def split_dot(x, w, total):
    """total + x w, x (16, K) float32 in two parts of the weights' precision, w (K, N)."""
    high = x.to(w.dtype)
    low = (x - high.to(tl.float32)).to(w.dtype)
    return tl.dot(low, w, tl.dot(high, w, total))


@triton.jit
def _dense(
    x, w, bias, y, N, B,
    K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[b, n] (+)= sum_k w[n, k] x[b, k]."""
    wait_for_producer(OVERLAP)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    b = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for step in range(0, K, DEPTH):
        inside = step + k < K
        place = n.to(tl.int64)[None, :] * K + (step + k)[:, None]
        weights = tl.load(w + place, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        read = tl.load(x + b[:, None] * K + (step + k)[None, :], mask=(b < B)[:, None] & inside[None, :], other=0.0)
        total = split_dot(read, weights, total)
    store_rows(total, bias, y, n, b, N, N, B, BIASED, ACCUMULATE)


@triton.jit
def store_rows(total, bias, y, n, b, end, STRIDE, B, BIASED: tl.constexpr, ACCUMULATE: tl.constexpr):
    """y[b, n] (+)= total + bias for the live sequences and the outputs before `end`; rows of y are STRIDE apart."""
    live = (b < B)[:, None] & (n < end)[None, :]
    place = y + b.to(tl.int64)[:, None] * STRIDE + n[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < end, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:
        total += tl.load(place, mask=live, other=0.0)
    tl.store(place, total, mask=live)


def bind(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None, accumulate: bool,
    chosen: Config | None = None,
) -> Launch:  # fmt: skip
    """Bind the product of a batch; shapes are checked by `kernels.batched_gemv.bind`."""
    require_half(w)
    batch, depth = x.shape
    outputs = w.shape[0]
    c = chosen or CONFIG
    read, launches = normed(x, norm)
    constants = {
        "K": depth, "ROWS": ROWS, "OUTPUTS": c.outputs, "DEPTH": c.depth, "BIASED": bias is not None,
        "ACCUMULATE": accumulate, "OVERLAP": overlaps(w),
    }  # fmt: skip
    arguments = (read, w, y if bias is None else bias, y, outputs, batch)
    grid = (triton.cdiv(outputs, c.outputs),)
    return chain([*launches, launcher(_dense, grid, arguments, constants, c.warps, c.stages)])


def require_half(w: torch.Tensor) -> None:
    """Raise ShapeError for weights whose products tensor cores would cut to fewer bits."""
    if w.dtype not in (torch.float16, torch.bfloat16):
        raise ShapeError(f"w has dtype {w.dtype}; products of a batch on a GPU take float16 and bfloat16")
