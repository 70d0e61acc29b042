"""Products of a batch in Triton: sixteen sequences are the rows of a tensor-core product.

So every weight is read once. Weights are half precision, inputs float32. A half keeps eleven bits of an input, so every
input is split into a half and what that leaves, again as a half: two products, 22 bits. Inputs beyond the half's range
do not occur behind a norm; where they do (65,504 and above) the result is not finite and shows. Unused rows of the
sixteen are zero. The sparse form masks the rows of w that no sequence activates: they are not read.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels import Launch
from kernels.cuda.common import launcher
from kernels.cuda.rows import chain, normed
from kernels.norm import Norm
from kernels.selection import Selection

ROWS = 16  # of a tensor-core product
OUTPUTS, DEPTH, WARPS = 32, 128, 4
STAGES = 4  # 4,096 outputs give one program per multiprocessor: blocks in flight alone hide the latency; 64 KB shared


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
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """y[b, n] (+)= sum_k w[n, k] x[b, k]."""
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
    _store(total, bias, y, n, b, N, N, B, BIASED, ACCUMULATE)


@triton.jit
def _store(total, bias, y, n, b, end, STRIDE, B, BIASED: tl.constexpr, ACCUMULATE: tl.constexpr):
    live = (b < B)[:, None] & (n < end)[None, :]
    place = y + b.to(tl.int64)[:, None] * STRIDE + n[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < end, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:
        total += tl.load(place, mask=live, other=0.0)
    tl.store(place, total, mask=live)


@triton.jit
def _sparse(
    x, w, bias, y, thresholds, kept, own, tiles, N, B, S,
    K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """The same over the channels that any sequence activates; w (K, N) input-major. Each sequence uses its own."""
    tile = tl.program_id(0) * 4
    start, end = tl.load(tiles + tile), tl.load(tiles + tile + 1)
    segment, counting = tl.load(tiles + tile + 2), tl.load(tiles + tile + 3)
    limit = tl.load(thresholds + segment)
    n = start + tl.arange(0, OUTPUTS)
    b = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    mine = tl.zeros((ROWS, DEPTH), dtype=tl.int32)
    union = tl.zeros((DEPTH,), dtype=tl.int32)
    for step in range(0, K, DEPTH):
        inside = step + k < K
        read = tl.load(x + b[:, None] * K + (step + k)[None, :], mask=(b < B)[:, None] & inside[None, :], other=0.0)
        active = (b < B)[:, None] & inside[None, :] & ((tl.abs(read) <= limit) == 0)
        wanted = tl.max(active.to(tl.int32), axis=0)
        place = (step + k).to(tl.int64)[:, None] * N + n[None, :]
        weights = tl.load(w + place, mask=(wanted != 0)[:, None] & (n < end)[None, :], other=0.0)
        total = split_dot(tl.where(active, read, 0.0), weights, total)
        mine += active.to(tl.int32)
        union += wanted
    _store(total, bias, y, n, b, end, N, B, BIASED, ACCUMULATE)
    if counting != 0:
        tl.store(kept + segment, tl.sum(union, axis=0))
        tl.store(own + b * S + segment, tl.sum(mine, axis=1), mask=b < B)


def bind(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None, accumulate: bool
) -> Launch:
    """Bind the product of a batch; shapes are checked by `kernels.batched_gemv.bind`."""
    batch, depth = x.shape
    outputs = w.shape[0]
    read, launches = normed(x, norm)
    constants = _constants(depth, bias, accumulate)
    arguments = (read, w, y if bias is None else bias, y, outputs, batch)
    return chain([*launches, launcher(_dense, (triton.cdiv(outputs, OUTPUTS),), arguments, constants, WARPS, STAGES)])


def bind_union(
    x: torch.Tensor, w_in: torch.Tensor, y: torch.Tensor, select: Selection, own: torch.Tensor,
    bias: torch.Tensor | None, norm: Norm | None, accumulate: bool,
) -> Callable[[], object]:  # fmt: skip
    """Bind the thresholded product; shapes are checked by `kernels.batched_sparse_gemv.bind`."""
    batch, depth = x.shape
    read, launches = normed(x, norm)
    tiles = [
        (start, high, s, int(start == low))
        for s, (low, high) in enumerate(itertools.pairwise(select.segments))
        for start in range(low, high, OUTPUTS)
    ]
    table = torch.tensor(tiles, dtype=torch.int32, device=w_in.device)
    arguments = (
        read, w_in, y if bias is None else bias, y, select.thresholds, select.kept, own, table, w_in.shape[1], batch,
        own.shape[1],
    )  # fmt: skip
    constants = _constants(depth, bias, accumulate)
    return chain([*launches, launcher(_sparse, (len(tiles),), arguments, constants, WARPS, STAGES)])


def _constants(depth: int, bias: torch.Tensor | None, accumulate: bool) -> dict[str, object]:
    return {
        "K": depth, "ROWS": ROWS, "OUTPUTS": OUTPUTS, "DEPTH": DEPTH, "BIASED": bias is not None,
        "ACCUMULATE": accumulate,
    }  # fmt: skip
