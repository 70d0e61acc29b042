"""Products on 8- and 4-bit weights in Triton: codes become float32 in registers, float32 inputs and sums.

Dense programs own a few rows of codes, thresholded ones a tile of columns and walk over the input channels, masking the
rows of codes that they skip. In 4 bits a step is one group of 64 channels, whose sum is scaled at its end.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from kernels import Launch, in_order
from kernels.cuda.common import launcher
from kernels.cuda.rows import normed
from kernels.norm import Norm
from kernels.quantised import GROUP, Quantised
from kernels.selection import Selection

ROWS, DEPTH, COLUMNS, WARPS = 8, 512, 64, 4


@triton.jit
def _dense8(
    x, q, scales, bias, y, N, K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for step in range(0, K, DEPTH):
        inside = step + k < K
        place = n.to(tl.int64)[:, None] * K + (step + k)[None, :]
        codes = tl.load(q + place, mask=(n < N)[:, None] & inside[None, :], other=0)
        total += codes.to(tl.float32) * tl.load(x + step + k, mask=inside, other=0.0)[None, :]
    result = tl.sum(total, axis=1) * tl.load(scales + n, mask=n < N, other=0.0)
    _store(result, bias, y, n, N, BIASED, ACCUMULATE)


@triton.jit
def _dense4(
    x, q, scales, bias, y, N, K: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Byte j of a group holds the codes of its inputs j and HALF + j."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, HALF)
    result = tl.zeros((ROWS,), dtype=tl.float32)
    for group in range(0, K // (2 * HALF)):
        place = n.to(tl.int64)[:, None] * (K // 2) + (group * HALF + j)[None, :]
        codes = tl.load(q + place, mask=(n < N)[:, None], other=0).to(tl.int32)
        left = tl.load(x + group * 2 * HALF + j)[None, :]
        right = tl.load(x + group * 2 * HALF + HALF + j)[None, :]
        part = ((codes & 15) - 8).to(tl.float32) * left + ((codes >> 4) - 8).to(tl.float32) * right
        result += tl.sum(part, axis=1) * tl.load(scales + group * N + n, mask=n < N, other=0.0)
    _store(result, bias, y, n, N, BIASED, ACCUMULATE)


@triton.jit
def _store(result, bias, y, n, end, BIASED: tl.constexpr, ACCUMULATE: tl.constexpr):
    if BIASED:
        result += tl.load(bias + n, mask=n < end, other=0.0).to(tl.float32)
    if ACCUMULATE:
        result += tl.load(y + n, mask=n < end, other=0.0)
    tl.store(y + n, result, mask=n < end)


@triton.jit
def _sparse(
    x, q, scales, bias, y, thresholds, kept, tiles, N,
    K: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, FOUR: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """y[n] (+)= sum over channels above the segment's threshold; q (K, N) codes, or (K, N / 2) bytes of two."""
    tile = tl.program_id(0) * 4
    start, end = tl.load(tiles + tile), tl.load(tiles + tile + 1)
    segment, counting = tl.load(tiles + tile + 2), tl.load(tiles + tile + 3)
    limit = tl.load(thresholds + segment)
    lane = tl.arange(0, COLUMNS)
    n = start + lane
    k = tl.arange(0, GROUP)
    result = tl.zeros((COLUMNS,), dtype=tl.float32)
    count = tl.zeros((GROUP,), dtype=tl.int32)
    for step in range(0, K, GROUP):
        inside = step + k < K
        value = tl.load(x + step + k, mask=inside, other=0.0)
        active = inside & ((tl.abs(value) <= limit) == 0)
        count += active.to(tl.int32)
        channel = (step + k).to(tl.int64)[:, None]
        wanted = active[:, None] & (n < end)[None, :]
        if FOUR:
            # A tile is one block of 64 neighbours: byte j holds neighbours j and 32 + j.
            half = COLUMNS // 2
            place = channel * (N // 2) + (start // 2 + lane % half)[None, :]
            pair = tl.load(q + place, mask=wanted, other=0).to(tl.int32)
            codes = ((pair >> (4 * (lane // half))[None, :]) & 15) - 8
            part = tl.sum(tl.where(active[:, None], codes.to(tl.float32) * value[:, None], 0.0), axis=0)
            result += part * tl.load(scales + (step // GROUP) * N + n, mask=n < end, other=0.0)
        else:
            codes = tl.load(q + channel * N + n[None, :], mask=wanted, other=0)
            result += tl.sum(tl.where(active[:, None], codes.to(tl.float32) * value[:, None], 0.0), axis=0)
    if not FOUR:
        result *= tl.load(scales + n, mask=n < end, other=0.0)
    _store(result, bias, y, n, end, BIASED, ACCUMULATE)
    if counting != 0:
        tl.store(kept + segment, tl.sum(count, axis=0))


def bind(
    x: torch.Tensor, weight: Quantised, y: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None, accumulate: bool
) -> Launch:
    """Bind the dense product; shapes are checked by `kernels.quant_gemv.bind`."""
    read, launches = normed(x[None], norm)
    outputs, depth = weight.outputs, weight.inputs
    arguments = (read, weight.q, weight.scales, y if bias is None else bias, y, outputs)
    constants = {"K": depth, "ROWS": ROWS, "BIASED": bias is not None, "ACCUMULATE": accumulate}
    grid = (triton.cdiv(outputs, ROWS),)
    if weight.bits == 8:
        return in_order([*launches, launcher(_dense8, grid, arguments, constants | {"DEPTH": DEPTH}, WARPS)])
    return in_order([*launches, launcher(_dense4, grid, arguments, constants | {"HALF": GROUP // 2}, WARPS)])


def bind_sparse(
    x: torch.Tensor, weight: Quantised, y: torch.Tensor, select: Selection, bias: torch.Tensor | None,
    norm: Norm | None, accumulate: bool,
) -> Launch:  # fmt: skip
    """Bind the thresholded product; shapes are checked by `kernels.quant_gemv.bind_sparse`."""
    read, launches = normed(x[None], norm)
    tiles = [
        (start, high, s, int(start == low))
        for s, (low, high) in enumerate(itertools.pairwise(select.segments))
        for start in range(low, high, COLUMNS)
    ]
    table = torch.tensor(tiles, dtype=torch.int32, device=weight.q.device)
    arguments = (
        read, weight.q_in, weight.scales, y if bias is None else bias, y, select.thresholds, select.kept, table,
        weight.outputs,
    )  # fmt: skip
    constants = {
        "K": weight.inputs, "GROUP": GROUP, "COLUMNS": COLUMNS, "FOUR": weight.bits == 4, "BIASED": bias is not None,
        "ACCUMULATE": accumulate,
    }  # fmt: skip
    return in_order([*launches, launcher(_sparse, (len(tiles),), arguments, constants, WARPS)])
