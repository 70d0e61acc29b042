"""Thresholded matrix-vector product in Triton: a program owns a few columns, selects for itself and masks the rows it skips.

Program t owns a column tile and walks over all input channels with six blocks of weights in flight: no partial sums in memory,
no atomics, no zeroing, and no launch for the selection. A tile of 32 columns makes reads of 64 bytes, the unit of the memory,
so that even 4,096 outputs occupy a GPU with 128 programs. Column tiles never straddle a segment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda.common import Norm, inverse_rms, launcher, multiprocessors, overlaps, power_of_two, wait_for_producer
from kernels.selection import Selection


@dataclass(frozen=True)
class Config:
    """columns per tile (gate and up together when paired), channels per block, warps, registers per thread (0: free), cache
    modifier of weight loads. Fewer channels than threads keep the loop free of barriers."""

    columns: int
    channels: int
    warps: int
    registers: int = 0
    cache: str = ".cg"


def config(depth: int, columns: int, processors: int, paired: bool) -> Config:
    """Return the launch configuration for a (depth, columns) input-major weight."""
    width = 32 if columns // 32 < 4 * processors else 64
    return Config(2 * width if paired else width, min(256, power_of_two(depth)), 16)


@triton.jit
def inputs(x, weight, channel, K: tl.constexpr, NORMED: tl.constexpr):
    """Return x and the norm's gain at `channel`, zero past K."""
    value = tl.load(x + channel, mask=channel < K, other=0.0)
    gain = value
    if NORMED:
        gain = tl.load(weight + channel, mask=channel < K, other=0.0)
    return value, gain


@triton.jit
def ask(
    value, gain, scale, thresholds, channel, w, source, second, live, K: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr,
    WHOLE: tl.constexpr, NORMED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Return the (CHANNELS, COLUMNS) weights of kept channels and the inputs that multiply them, zero elsewhere."""
    if NORMED:
        value = value * gain * scale
    size = tl.abs(value)
    inside = channel < K
    keep = inside & ((size <= thresholds[0]) == 0)
    wanted = keep[:, None]
    if PARTS == 2:
        keep_up = inside & ((size <= thresholds[1]) == 0)
        wanted = (wanted & (second == 0)) | (keep_up[:, None] & second)
        keep = keep | keep_up
    if not WHOLE:
        wanted = wanted & live
    pointers = w + channel.to(tl.int64)[:, None] * STRIDE + source
    return tl.load(pointers, mask=wanted, other=0.0, cache_modifier=CACHE), tl.where(keep, value, 0.0)


@triton.jit
def add(total, block, factor, ROWS: tl.constexpr):
    """Add a block's products to (ROWS, COLUMNS) running sums; the rows of one thread meet in its registers."""
    product = block.to(tl.float32) * factor[:, None]
    pieces: tl.constexpr = block.shape[0] // ROWS
    return total + tl.sum(tl.reshape(product, (pieces, ROWS, block.shape[1])), axis=0)


@triton.jit
def thresholded(
    x, weight, w, bias, y, thresholds, kept, tiles, eps,
    N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr, NORMED: tl.constexpr,
    BIASED: tl.constexpr, ACCUMULATE: tl.constexpr, CACHE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """PARTS = 1: y[n] (+)= sum over kept i of x[i] w[i, n]. PARTS = 2: y = silu(part 0) * part 1, part p at columns N p + n.

    With two parts a tile holds COLUMNS / 2 columns of each, side by side. A block of weights is asked for once its inputs have
    arrived, six blocks before it is added; its inputs are asked for twelve blocks before.
    """
    tile = tl.program_id(0) * 4
    start = tl.multiple_of(tl.load(tiles + tile), ALIGN)
    end = tl.load(tiles + tile + 1)
    segment = tl.load(tiles + tile + 2)
    counting = tl.load(tiles + tile + 3)
    limits = (tl.load(thresholds + segment), tl.load(thresholds + segment + PARTS - 1))
    half: tl.constexpr = COLUMNS // PARTS
    lane = tl.arange(0, COLUMNS)
    within = start + lane % half
    source = (within + (lane // half) * N)[None, :]
    second = (lane >= half)[None, :]
    live = (within < end)[None, :]
    c = tl.arange(0, CHANNELS)
    wait_for_producer(OVERLAP)

    x0, g0 = inputs(x, weight, c, K, NORMED)
    x1, g1 = inputs(x, weight, c + CHANNELS, K, NORMED)
    x2, g2 = inputs(x, weight, c + 2 * CHANNELS, K, NORMED)
    x3, g3 = inputs(x, weight, c + 3 * CHANNELS, K, NORMED)
    x4, g4 = inputs(x, weight, c + 4 * CHANNELS, K, NORMED)
    x5, g5 = inputs(x, weight, c + 5 * CHANNELS, K, NORMED)
    scale = 1.0
    if NORMED:
        scale = inverse_rms(x, eps, K, SPAN)
    b0, f0 = ask(x0, g0, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
    b1, f1 = ask(x1, g1, scale, limits, c + CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
    b2, f2 = ask(x2, g2, scale, limits, c + 2 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
    b3, f3 = ask(x3, g3, scale, limits, c + 3 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
    b4, f4 = ask(x4, g4, scale, limits, c + 4 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
    b5, f5 = ask(x5, g5, scale, limits, c + 5 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
    c += 6 * CHANNELS
    x0, g0 = inputs(x, weight, c, K, NORMED)
    x1, g1 = inputs(x, weight, c + CHANNELS, K, NORMED)
    x2, g2 = inputs(x, weight, c + 2 * CHANNELS, K, NORMED)
    x3, g3 = inputs(x, weight, c + 3 * CHANNELS, K, NORMED)
    x4, g4 = inputs(x, weight, c + 4 * CHANNELS, K, NORMED)
    x5, g5 = inputs(x, weight, c + 5 * CHANNELS, K, NORMED)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, K, 6 * CHANNELS):
        total = add(total, b0, f0, ROWS)
        b0, f0 = ask(x0, g0, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
        x0, g0 = inputs(x, weight, c + 6 * CHANNELS, K, NORMED)
        c += CHANNELS
        total = add(total, b1, f1, ROWS)
        b1, f1 = ask(x1, g1, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
        x1, g1 = inputs(x, weight, c + 6 * CHANNELS, K, NORMED)
        c += CHANNELS
        total = add(total, b2, f2, ROWS)
        b2, f2 = ask(x2, g2, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
        x2, g2 = inputs(x, weight, c + 6 * CHANNELS, K, NORMED)
        c += CHANNELS
        total = add(total, b3, f3, ROWS)
        b3, f3 = ask(x3, g3, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
        x3, g3 = inputs(x, weight, c + 6 * CHANNELS, K, NORMED)
        c += CHANNELS
        total = add(total, b4, f4, ROWS)
        b4, f4 = ask(x4, g4, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
        x4, g4 = inputs(x, weight, c + 6 * CHANNELS, K, NORMED)
        c += CHANNELS
        total = add(total, b5, f5, ROWS)
        b5, f5 = ask(x5, g5, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, CACHE)
        x5, g5 = inputs(x, weight, c + 6 * CHANNELS, K, NORMED)
        c += CHANNELS
    result = tl.sum(total, axis=0)
    column = start + tl.arange(0, half)
    if PARTS == 2:
        gate, up = tl.split(tl.trans(tl.reshape(result, (2, half))))
        result = gate / (1.0 + tl.exp(-gate)) * up
    mine = column < end
    if BIASED:
        result += tl.load(bias + column, mask=mine, other=0.0).to(tl.float32)
    if ACCUMULATE:
        result += tl.load(y + column, mask=mine, other=0.0)
    tl.store(y + column, result, mask=mine)

    if counting != 0:
        every = tl.arange(0, SPAN)
        exists = every < K
        read, gain = inputs(x, weight, every, K, NORMED)
        if NORMED:
            read = read * gain * scale
        for part in tl.static_range(PARTS):
            counted = exists & ((tl.abs(read) <= limits[part]) == 0)
            tl.store(kept + segment + part, tl.sum(counted.to(tl.int32), axis=0))


def _tiles(segments: tuple[int, ...], width: int) -> list[tuple[int, int, int, int]]:
    """Return (first column, end, segment, 1 for the tile that counts its segment) of every tile."""
    return [
        (start, min(start + width, high), s, int(start == low))
        for s, (low, high) in enumerate(itertools.pairwise(segments))
        for start in range(low, high, width)
    ]


def bind_thresholded(
    x: torch.Tensor, w_in: torch.Tensor, y: torch.Tensor, select: Selection, bias: torch.Tensor | None,
    norm: Norm | None, accumulate: bool, paired: bool, chosen: Config | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Bind the shared kernel of sparse_gemv (paired False) and sparse gate_up (paired True, segments (0, N, 2N))."""
    depth, outputs = w_in.shape[0], y.shape[0]
    parts = 2 if paired else 1
    c = chosen or config(depth, w_in.shape[1], multiprocessors(w_in), paired)
    tiles = _tiles((0, outputs) if paired else select.segments, c.columns // parts)
    edges = [tile[0] for tile in tiles] + [tile[1] for tile in tiles] + [outputs, w_in.shape[1]]
    constants = {
        "N": outputs, "K": depth, "STRIDE": w_in.shape[1], "COLUMNS": c.columns, "CHANNELS": c.channels,
        "ROWS": min(c.channels, max(1, c.warps * 256 // c.columns)), "SPAN": power_of_two(depth), "PARTS": parts,
        "ALIGN": math.gcd(16, *edges), "WHOLE": all(end - start == c.columns // parts for start, end, _, _ in tiles),
        "NORMED": norm is not None, "BIASED": bias is not None, "ACCUMULATE": accumulate, "CACHE": c.cache, "OVERLAP": overlaps(w_in),
    }  # fmt: skip
    table = torch.tensor(tiles, dtype=torch.int32, device=w_in.device)
    weight, eps = (norm.weight, norm.eps) if norm else (x, 0.0)
    arguments = (x, weight, w_in, y if bias is None else bias, y, select.thresholds, select.kept, table, eps)
    return launcher(thresholded, (len(tiles),), arguments, constants, c.warps, registers=c.registers)


def bind(
    x: torch.Tensor,
    w_in: torch.Tensor,
    y: torch.Tensor,
    select: Selection,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    accumulate: bool = False,
    chosen: Config | None = None,
) -> Callable[[], object]:
    """Bind the thresholded product of n(x), written to y or added to it; n is the identity or `norm`. x (K,), w_in (K, N)."""
    return bind_thresholded(x, w_in, y, select, bias, norm, accumulate, False, chosen)
