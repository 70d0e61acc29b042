"""Dense matrix-vector product in Triton: a few whole rows per program, the first tile loaded before the predecessor
ends.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda.common import launcher, multiprocessors, norm_arguments, overlaps, power_of_two, wait_for_producer
from kernels.norm import Norm


@dataclass(frozen=True)
class Config:
    """rows of w at a time (pairs when gated), weights of one row read at once, warps, registers per thread (0: free)
    and, for the form whose programs walk over all rows with x in registers, programs per multiprocessor (block must
    reach K).
    """

    rows: int
    block: int
    warps: int
    registers: int = 0
    resident: int = 0


def config(rows: int, depth: int, paired: bool, item: int = 2) -> Config:
    """Return the launch configuration for a (rows, depth) weight of `item` bytes per element: resident programs, two
    groups of 32 KB in flight on each multiprocessor; rows too long for registers are read in pieces by programs of
    their own. Measured for two bytes; four keep the bytes in flight and are untuned.
    """
    block = power_of_two(depth)
    if block > 32768 // item:
        return Config(2 if paired else 4, 1024, 4)
    taken = 8 // item if block <= 4096 else 2
    warps = max(1, min(16, taken * block // 1024))
    resident = max(1, min(8, 65536 // (item * taken * block)))
    return Config(taken // 2 if paired else taken, block, warps, 0, resident)


@triton.jit
def dense(
    x, weight, w, bias, y, eps, N, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[n] (+)= sum_k w[n, k] x[k]; PAIRED: y[n] = silu(w[n] . x) * (w[N + n] . x). ROWS counts the rows of w that
    are read.
    """
    lane = tl.arange(0, ROWS)
    if PAIRED:
        out_row = tl.program_id(0) * (ROWS // 2) + lane // 2
        row = out_row + (lane % 2) * N
    else:
        out_row = tl.program_id(0) * ROWS + lane
        row = out_row
    k = tl.arange(0, BLOCK)
    pointers = w + row.to(tl.int64)[:, None] * K + k[None, :]
    whole: tl.constexpr = K % BLOCK == 0
    live = (out_row < N)[:, None]
    first = tl.load(pointers, mask=live if whole else live & (k < K)[None, :], other=0.0)
    wait_for_producer(OVERLAP)

    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    square = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in tl.static_range(0, K, BLOCK):
        inside = k < K - step
        if step == 0:
            tile = first
        elif whole:
            tile = tl.load(pointers + step, mask=live, other=0.0)
        else:
            tile = tl.load(pointers + step, mask=live & inside[None, :], other=0.0)
        value = tl.load(x + step + k) if whole else tl.load(x + step + k, mask=inside, other=0.0)
        if NORMED:
            square += value * value
            value *= tl.load(weight + step + k) if whole else tl.load(weight + step + k, mask=inside, other=0.0)
        total += tile.to(tl.float32) * value[None, :]
    result = tl.sum(total, axis=1)
    if NORMED:
        result *= 1.0 / tl.sqrt(tl.sum(square, axis=0) / K + eps)
    if PAIRED:
        gate, up = tl.split(tl.reshape(result, (ROWS // 2, 2)))
        out_row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        result = gate / (1.0 + tl.exp(-gate)) * up
    if BIASED:
        result += tl.load(bias + out_row, mask=out_row < N, other=0.0).to(tl.float32)
    if ACCUMULATE:
        result += tl.load(y + out_row, mask=out_row < N, other=0.0)
    tl.store(y + out_row, result, mask=out_row < N)


@triton.jit
def dense_persistent(
    x, weight, w, bias, y, eps, N, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `dense` with K <= BLOCK: x stays in registers while a program walks over row groups, one group ahead of the
    sums.
    """
    outputs: tl.constexpr = ROWS // 2 if PAIRED else ROWS
    lane = tl.arange(0, ROWS)
    part = lane // 2 + (lane % 2) * N if PAIRED else lane
    k = tl.arange(0, BLOCK)
    whole: tl.constexpr = K == BLOCK
    begin = tl.program_id(0) * outputs
    stride = tl.num_programs(0) * outputs
    own = lane // 2 if PAIRED else lane
    live = (begin + own < N)[:, None]
    pointers = w + (begin + part).to(tl.int64)[:, None] * K + k[None, :]
    ahead = tl.load(pointers, mask=live if whole else live & (k < K)[None, :], other=0.0)
    if NORMED:
        gain = tl.load(weight + k) if whole else tl.load(weight + k, mask=k < K, other=0.0)
    wait_for_producer(OVERLAP)

    value = tl.load(x + k) if whole else tl.load(x + k, mask=k < K, other=0.0)
    scale = 1.0
    if NORMED:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / K + eps)
        value *= gain
    for first in range(begin, N, stride):
        tile = ahead
        pointers += stride.to(tl.int64) * K
        live = (first + stride + own < N)[:, None]
        ahead = tl.load(pointers, mask=live if whole else live & (k < K)[None, :], other=0.0)
        result = tl.sum(tile.to(tl.float32) * value[None, :], axis=1) * scale
        if PAIRED:
            gate, up = tl.split(tl.reshape(result, (outputs, 2)))
            result = gate / (1.0 + tl.exp(-gate)) * up
        out_row = first + tl.arange(0, outputs)
        if BIASED:
            result += tl.load(bias + out_row, mask=out_row < N, other=0.0).to(tl.float32)
        if ACCUMULATE:
            result += tl.load(y + out_row, mask=out_row < N, other=0.0)
        tl.store(y + out_row, result, mask=out_row < N)


def bind_dense(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None, accumulate: bool,
    paired: bool, chosen: Config | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Bind the shared kernel of gemv (paired False) and gate_up (paired True: w holds 2N rows, gate first)."""
    outputs, depth = y.shape[0], w.shape[1]
    c = chosen or config(outputs, depth, paired, w.element_size())
    constants = {
        "K": depth, "ROWS": 2 * c.rows if paired else c.rows, "BLOCK": c.block, "PAIRED": paired,
        "NORMED": norm is not None,
        "BIASED": bias is not None, "ACCUMULATE": accumulate, "OVERLAP": overlaps(w),
    }  # fmt: skip
    weight, eps = norm_arguments(norm, x)
    arguments = (x, weight, w, y if bias is None else bias, y, eps, outputs)
    groups = triton.cdiv(outputs, c.rows)
    if not c.resident:
        return launcher(dense, (groups,), arguments, constants, c.warps, registers=c.registers)
    programs = min(groups, c.resident * multiprocessors(w))
    return launcher(dense_persistent, (programs,), arguments, constants, c.warps, registers=c.registers)


def bind(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    accumulate: bool = False,
    chosen: Config | None = None,
) -> Callable[[], object]:
    """Bind y = w n(x) + bias, or y += ... when `accumulate`; n is the identity or `norm`. x (K,), w (N, K), y (N,)."""
    return bind_dense(x, w, y, bias, norm, accumulate, False, chosen)
