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
    """columns per tile (gate and up together when paired), input channels per slice, channels read at once, warps, registers
    per thread (0: the compiler's choice)."""

    columns: int
    slice: int
    channels: int
    warps: int
    registers: int = 0


def config(depth: int, columns: int, processors: int) -> Config:
    """Return the launch configuration for a (depth, columns) input-major weight: at least four programs per multiprocessor."""
    width = min(256, power_of_two(columns))
    tiles = max(1, columns // width)
    channels = min(32, power_of_two(depth))
    fewest = max(1, round(4 * processors / tiles))
    size = max(channels, min(256, channels * (depth // fewest // channels)))
    return Config(width, size, channels, 8)


@triton.jit
def thresholded(
    x, weight, w, bias, y, thresholds, kept, tiles, partial, arrivals, counts, eps,
    N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr, MERGE: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """PARTS = 1: y[n] (+)= sum over kept i of x[i] w[i, n]. PARTS = 2: y = silu(part 0) * part 1, part p at columns N p + n.

    With two parts a tile holds COLUMNS / 2 columns of each, side by side.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row_stride = tl.num_programs(0) * COLUMNS
    start = tl.multiple_of(tl.load(tiles + tile * 4), ALIGN)
    end = tl.load(tiles + tile * 4 + 1)
    segment = tl.load(tiles + tile * 4 + 2)
    counting = tl.load(tiles + tile * 4 + 3)
    half: tl.constexpr = COLUMNS // PARTS
    lane = tl.arange(0, COLUMNS)
    within = start + lane % half
    source = (within + (lane // half) * N)[None, :]
    second = (lane >= half)[None, :]
    threshold = tl.load(thresholds + segment)
    threshold_up = tl.load(thresholds + segment + PARTS - 1)
    row = tl.arange(0, CHANNELS)
    wait_for_producer(OVERLAP)

    scale = 1.0
    if NORMED:
        scale = inverse_rms(x, eps, K, SPAN)
    total = tl.zeros((CHANNELS, COLUMNS), dtype=tl.float32)
    read = tl.zeros((CHANNELS,), dtype=tl.int32)
    read_up = tl.zeros((CHANNELS,), dtype=tl.int32)
    for step in tl.static_range(0, SLICE, CHANNELS):
        channel = split * SLICE + step + row
        inside = channel < K
        value = tl.load(x + channel, mask=inside, other=0.0)
        if NORMED:
            value = value * tl.load(weight + channel, mask=inside, other=0.0) * scale
        size = tl.abs(value)
        keep = inside & ((size <= threshold) == 0)
        read += keep.to(tl.int32)
        pointers = w + channel.to(tl.int64)[:, None] * STRIDE + source
        if PARTS == 2:
            keep_up = inside & ((size <= threshold_up) == 0)
            read_up += keep_up.to(tl.int32)
            wanted = (keep[:, None] & (second == 0)) | (keep_up[:, None] & second)
            factor = tl.where(keep | keep_up, value, 0.0)
        else:
            wanted = keep[:, None]
            factor = tl.where(keep, value, 0.0)
        if WHOLE:
            block = tl.load(pointers, mask=wanted, other=0.0)
        else:
            block = tl.load(pointers, mask=wanted & (within < end)[None, :], other=0.0)
        product = block.to(tl.float32) * factor[:, None]
        if PARTS == 2:
            product = tl.where(wanted, product, 0.0)
        total += product
    tl.store(partial + split * row_stride + tile * COLUMNS + lane, tl.sum(total, axis=0))
    if counting != 0:
        tl.store(counts + segment * SLICES + split, tl.sum(read, axis=0))
        if PARTS == 2:
            tl.store(counts + (segment + 1) * SLICES + split, tl.sum(read_up, axis=0))

    if arrives_last(arrivals + tile, SLICES):
        out_lane = tl.arange(0, half)
        column = start + out_lane
        order = tl.arange(0, MERGE)
        result = tl.zeros((half,), dtype=tl.float32)
        result_up = tl.zeros((half,), dtype=tl.float32)
        for low in tl.static_range(0, SLICES, MERGE):
            real = (low + order < SLICES)[:, None]
            pieces = partial + (low + order)[:, None] * row_stride + (tile * COLUMNS + out_lane)[None, :]
            result += tl.sum(tl.load(pieces, mask=real, other=0.0, cache_modifier=".cg"), axis=0)
            if PARTS == 2:
                result_up += tl.sum(tl.load(pieces + half, mask=real, other=0.0, cache_modifier=".cg"), axis=0)
        if PARTS == 2:
            result = result / (1.0 + tl.exp(-result)) * result_up
        live = column < end
        if BIASED:
            result += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
        if ACCUMULATE:
            result += tl.load(y + column, mask=live, other=0.0)
        tl.store(y + column, result, mask=live)
        if counting != 0:
            for part in tl.static_range(PARTS):
                seen = tl.zeros((MERGE,), dtype=tl.int32)
                for low in tl.static_range(0, SLICES, MERGE):
                    slot = counts + (segment + part) * SLICES + low + order
                    seen += tl.load(slot, mask=low + order < SLICES, other=0, cache_modifier=".cg")
                tl.store(kept + segment + part, tl.sum(seen, axis=0))


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
    c = chosen or config(depth, w_in.shape[1], multiprocessors(w_in))
    parts = 2 if paired else 1
    tiles = _tiles((0, outputs) if paired else select.segments, c.columns // parts)
    slices = math.ceil(depth / c.slice)
    assert len(tiles) <= MAX_TILE_COUNTERS, "more column tiles than arrival counters"
    partial = workspace("partial", w_in, slices * len(tiles) * c.columns)
    counts = workspace("counts", w_in, 1 << 16).view(torch.int32)
    assert slices * len(select.segments) <= counts.numel(), "more channel slices than the count buffer holds"
    edges = [tile[0] for tile in tiles] + [tile[1] for tile in tiles] + [outputs, w_in.shape[1]]
    constants = {
        "N": outputs, "K": depth, "STRIDE": w_in.shape[1], "SLICE": c.slice, "SLICES": slices,
        "MERGE": min(32, power_of_two(slices)), "COLUMNS": c.columns, "CHANNELS": c.channels, "SPAN": power_of_two(depth),
        "PARTS": parts, "ALIGN": math.gcd(16, *edges), "WHOLE": all(end - start == c.columns // parts for start, end, _, _ in tiles),
        "NORMED": norm is not None, "BIASED": bias is not None, "ACCUMULATE": accumulate, "OVERLAP": overlaps(w_in),
    }  # fmt: skip
    table = torch.tensor(tiles, dtype=torch.int32, device=w_in.device)
    weight, eps = (norm.weight, norm.eps) if norm else (x, 0.0)
    arguments = (
        x, weight, w_in, y if bias is None else bias, y, select.thresholds, select.kept, table, partial, counters(w_in), counts, eps,
    )  # fmt: skip
    return launcher(thresholded, (len(tiles), slices), arguments, constants, c.warps, registers=c.registers)


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
