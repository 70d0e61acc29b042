"""Thresholded matrix-vector product in Triton: every program selects within its own slice of x and masks the rows it skips.

A grid of column tiles x channel slices. Program (tile, slice) reads the kept rows of its slice, writes one partial sum per column,
and the last slice of a tile to arrive adds the partial sums in slice order: no zeroing, no atomics on results, and no
launch for the selection. Column tiles never straddle a segment, so a tile has one threshold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda.common import (
    MAX_TILE_COUNTERS,
    Norm,
    arrives_last,
    counters,
    inverse_rms,
    launcher,
    multiprocessors,
    overlaps,
    power_of_two,
    wait_for_producer,
    workspace,
)
from kernels.selection import Selection


@dataclass(frozen=True)
class Config:
    """columns per tile, input channels per slice, channels read at once, warps."""

    columns: int
    slice: int
    channels: int
    warps: int


def config(depth: int, columns: int, processors: int, paired: bool) -> Config:
    """Return the launch configuration for a (depth, columns) input-major weight: about four programs per multiprocessor."""
    width = min(256, power_of_two(columns))
    tiles = max(1, columns // width)
    channels = 64
    target = max(1, round(4 * processors / tiles))
    size = max(channels, channels * math.ceil(depth / target / channels))
    return Config(width, size, channels, 8)


@triton.jit
def thresholded(
    x, weight, w, bias, y, thresholds, kept, tiles, partial, arrivals, counts, eps, N,
    K: tl.constexpr, STRIDE: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, SLICES_SPAN: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """PARTS = 1: y[n] (+)= sum over kept i of x[i] w[i, n]. PARTS = 2: y = silu(part 0) * part 1, part p at columns N p + n."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tiles_total = tl.num_programs(0)
    start = tl.multiple_of(tl.load(tiles + tile * 4), ALIGN)
    end = tl.load(tiles + tile * 4 + 1)
    segment = tl.load(tiles + tile * 4 + 2)
    counting = tl.load(tiles + tile * 4 + 3)
    column = start + tl.arange(0, COLUMNS)
    lane = tl.arange(0, CHANNELS)
    wait_for_producer(OVERLAP)

    scale = 1.0
    if NORMED:
        scale = inverse_rms(x, eps, K, SPAN)
    for part in tl.static_range(PARTS):
        threshold = tl.load(thresholds + segment + part)
        total = tl.zeros((CHANNELS, COLUMNS), dtype=tl.float32)
        read = tl.zeros((CHANNELS,), dtype=tl.int32)
        for step in tl.static_range(0, SLICE, CHANNELS):
            channel = split * SLICE + step + lane
            inside = channel < K
            value = tl.load(x + channel, mask=inside, other=0.0)
            if NORMED:
                value = value * tl.load(weight + channel, mask=inside, other=0.0) * scale
            keep = inside & ((tl.abs(value) <= threshold) == 0)
            pointers = w + channel.to(tl.int64)[:, None] * STRIDE + (column + part * N)[None, :]
            if WHOLE:
                block = tl.load(pointers, mask=keep[:, None], other=0.0)
            else:
                block = tl.load(pointers, mask=keep[:, None] & (column < end)[None, :], other=0.0)
            total += block.to(tl.float32) * tl.where(keep, value, 0.0)[:, None]
            read += keep.to(tl.int32)
        at = partial + (split * PARTS + part) * (tiles_total * COLUMNS) + tile * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(at, tl.sum(total, axis=0))
        if counting != 0:
            tl.store(counts + (segment + part) * SLICES + split, tl.sum(read, axis=0))

    if arrives_last(arrivals + tile, SLICES):
        order = tl.arange(0, SLICES_SPAN)
        at = partial + order[:, None] * (PARTS * tiles_total * COLUMNS) + tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        real = (order < SLICES)[:, None]
        result = tl.sum(tl.load(at, mask=real, other=0.0, cache_modifier=".cg"), axis=0)
        if PARTS == 2:
            up = tl.sum(tl.load(at + tiles_total * COLUMNS, mask=real, other=0.0, cache_modifier=".cg"), axis=0)
            result = result / (1.0 + tl.exp(-result)) * up
        if BIASED:
            result += tl.load(bias + column, mask=column < end, other=0.0).to(tl.float32)
        if ACCUMULATE:
            result += tl.load(y + column, mask=column < end, other=0.0)
        tl.store(y + column, result, mask=column < end)
        if counting != 0:
            for part in tl.static_range(PARTS):
                read = tl.load(
                    counts + (segment + part) * SLICES + order, mask=order < SLICES, other=0, cache_modifier=".cg"
                )
                tl.store(kept + segment + part, tl.sum(read, axis=0))


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
    c = chosen or config(depth, w_in.shape[1], multiprocessors(w_in), paired)
    tiles = _tiles((0, outputs) if paired else select.segments, c.columns)
    slices, parts = math.ceil(depth / c.slice), 2 if paired else 1
    assert len(tiles) <= MAX_TILE_COUNTERS, "more column tiles than arrival counters"
    partial = workspace("partial", w_in, slices * parts * len(tiles) * c.columns)
    counts = workspace("counts", w_in, 4096 * 4).view(torch.int32)
    assert slices * len(select.segments) <= counts.numel(), "more channel slices than the count buffer holds"
    starts = [tile[0] for tile in tiles] + [outputs if paired else 16, w_in.shape[1]]
    constants = {
        "K": depth, "STRIDE": w_in.shape[1], "SLICE": c.slice, "SLICES": slices, "SLICES_SPAN": power_of_two(slices),
        "COLUMNS": c.columns, "CHANNELS": c.channels, "SPAN": power_of_two(depth), "PARTS": parts,
        "ALIGN": math.gcd(16, *starts), "WHOLE": all(end - start == c.columns for start, end, _, _ in tiles),
        "NORMED": norm is not None, "BIASED": bias is not None, "ACCUMULATE": accumulate, "OVERLAP": overlaps(w_in),
    }  # fmt: skip
    table = torch.tensor(tiles, dtype=torch.int32, device=w_in.device)
    weight, eps = (norm.weight, norm.eps) if norm else (x, 0.0)
    arguments = (
        x, weight, w_in, y if bias is None else bias, y, select.thresholds, select.kept, table, partial, counters(w_in), counts,
        eps, outputs,
    )  # fmt: skip
    return launcher(thresholded, (len(tiles), slices), arguments, constants, c.warps)


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
