"""Thresholded matrix-vector product in Triton: a program owns a few columns, selects for itself and masks the rows it skips.

Program t owns a column tile and walks over all input channels, one block of channels ahead of the sums: no partial sums in
memory, no atomics, no zeroing, and no launch for the selection. A tile of 32 columns makes reads of 64 bytes, the unit of
the memory, so that even 4,096 outputs fill a GPU with 128 programs. Column tiles never straddle a segment.
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
    """columns per tile (gate and up together when paired), channels per block, warps, registers per thread (0: free)."""

    columns: int
    channels: int
    warps: int
    registers: int = 0


def config(depth: int, columns: int, processors: int, paired: bool) -> Config:
    """Return the launch configuration for a (depth, columns) input-major weight."""
    width = 32 if columns // 32 < 4 * processors else 64
    return Config(2 * width if paired else width, min(1024, power_of_two(depth)), 16)


@triton.jit
def kept_rows(
    value, inside, threshold, threshold_up, channel, w, source, second, live, STRIDE: tl.constexpr, PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the (CHANNELS, COLUMNS) weights of kept channels and the inputs that multiply them, zero elsewhere."""
    size = tl.abs(value)
    keep = inside & ((size <= threshold) == 0)
    wanted = keep[:, None]
    if PARTS == 2:
        keep_up = inside & ((size <= threshold_up) == 0)
        wanted = (wanted & (second == 0)) | (keep_up[:, None] & second)
        keep = keep | keep_up
    if not WHOLE:
        wanted = wanted & live
    pointers = w + channel.to(tl.int64)[:, None] * STRIDE + source
    return tl.load(pointers, mask=wanted, other=0.0), tl.where(keep, value, 0.0)


@triton.jit
def thresholded(
    x, weight, w, bias, y, thresholds, kept, tiles, eps,
    N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr, NORMED: tl.constexpr,
    BIASED: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """PARTS = 1: y[n] (+)= sum over kept i of x[i] w[i, n]. PARTS = 2: y = silu(part 0) * part 1, part p at columns N p + n.

    With two parts a tile holds COLUMNS / 2 columns of each, side by side.
    """
    tile = tl.program_id(0) * 4
    start = tl.multiple_of(tl.load(tiles + tile), ALIGN)
    end = tl.load(tiles + tile + 1)
    segment = tl.load(tiles + tile + 2)
    counting = tl.load(tiles + tile + 3)
    threshold = tl.load(thresholds + segment)
    threshold_up = tl.load(thresholds + segment + PARTS - 1)
    half: tl.constexpr = COLUMNS // PARTS
    lane = tl.arange(0, COLUMNS)
    within = start + lane % half
    source = (within + (lane // half) * N)[None, :]
    second = (lane >= half)[None, :]
    live = (within < end)[None, :]
    channel = tl.arange(0, CHANNELS)
    inside = channel < K
    wait_for_producer(OVERLAP)

    scale = 1.0
    if NORMED:
        scale = inverse_rms(x, eps, K, SPAN)
    value = tl.load(x + channel, mask=inside, other=0.0)
    if NORMED:
        value = value * tl.load(weight + channel, mask=inside, other=0.0) * scale
    block, factor = kept_rows(
        value, inside, threshold, threshold_up, channel, w, source, second, live, STRIDE, PARTS, WHOLE
    )
    channel += CHANNELS
    inside = channel < K
    upcoming = tl.load(x + channel, mask=inside, other=0.0)
    gain = upcoming
    if NORMED:
        gain = tl.load(weight + channel, mask=inside, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, K, CHANNELS):
        value = upcoming
        if NORMED:
            value = value * gain * scale
        ahead, factor_ahead = kept_rows(
            value, inside, threshold, threshold_up, channel, w, source, second, live, STRIDE, PARTS, WHOLE
        )
        channel += CHANNELS
        inside = channel < K
        upcoming = tl.load(x + channel, mask=inside, other=0.0)
        if NORMED:
            gain = tl.load(weight + channel, mask=inside, other=0.0)
        product = block.to(tl.float32) * factor[:, None]
        total += tl.sum(tl.reshape(product, (CHANNELS // ROWS, ROWS, COLUMNS)), axis=0)
        block = ahead
        factor = factor_ahead
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
        read = tl.load(x + every, mask=exists, other=0.0)
        if NORMED:
            read = read * tl.load(weight + every, mask=exists, other=0.0) * scale
        for part in tl.static_range(PARTS):
            limit = tl.load(thresholds + segment + part)
            counted = exists & ((tl.abs(read) <= limit) == 0)
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
        "NORMED": norm is not None, "BIASED": bias is not None, "ACCUMULATE": accumulate, "OVERLAP": overlaps(w_in),
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
