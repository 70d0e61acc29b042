"""Thresholded matrix-vector product in Triton: every program selects within its own slice of x and reads only kept rows.

A grid of column tiles x channel slices. Program (tile, slice) compares its slice of x with the threshold, writes the kept
channels to a list of its own, reads their weight rows two blocks ahead, and leaves one partial sum per column. The last slice
of a tile to arrive adds the partial sums in slice order: no zeroing, no atomics on results, no launch for the selection.
Column tiles never straddle a segment, so a tile has one threshold.
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
    """Return the launch configuration for a (depth, columns) input-major weight: three programs per multiprocessor."""
    width = min(256, power_of_two(columns))
    tiles = max(1, columns // width)
    slices = max(1, 3 * processors // tiles)
    return Config(width, math.ceil(depth / slices), 32, 8)


@triton.jit
def kept_rows(entry, w, source, second, within, end, STRIDE: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr):
    """Return the (CHANNELS, COLUMNS) weights of listed channels; an entry without flags reads nothing."""
    low = entry.to(tl.int32)
    wanted = ((low >> 28) & 1 != 0)[:, None]
    if PARTS == 2:
        wanted = (wanted & (second == 0)) | (((low >> 29) & 1 != 0)[:, None] & second)
    if not WHOLE:
        wanted = wanted & (within < end)[None, :]
    pointers = w + (low & 0x0FFFFFFF).to(tl.int64)[:, None] * STRIDE + source
    return tl.load(pointers, mask=wanted, other=0.0)


@triton.jit
def thresholded(
    x, weight, w, bias, y, thresholds, kept, tiles, listed, partial, arrivals, counts, eps,
    N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, SLICE: tl.constexpr, SLICE_SPAN: tl.constexpr,
    SLICES: tl.constexpr, MERGE: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr, NORMED: tl.constexpr,
    BIASED: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """PARTS = 1: y[n] (+)= sum over kept i of x[i] w[i, n]. PARTS = 2: y = silu(part 0) * part 1, part p at columns N p + n.

    With two parts a tile holds COLUMNS / 2 columns of each, side by side, and a listed channel carries one flag for each.
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
    place = tl.arange(0, SLICE_SPAN)
    channel = split * SLICE + place
    inside = (place < SLICE) & (channel < K)
    if NORMED:
        gain = tl.load(weight + channel, mask=inside, other=0.0)
    wait_for_producer(OVERLAP)

    value = tl.load(x + channel, mask=inside, other=0.0)
    if NORMED:
        value = value * gain * inverse_rms(x, eps, K, SPAN)
    keep = (inside & ((tl.abs(value) <= threshold) == 0)).to(tl.int32)
    either = keep
    flags = keep << 28
    if PARTS == 2:
        keep_up = (inside & ((tl.abs(value) <= threshold_up) == 0)).to(tl.int32)
        either = keep | keep_up
        flags = flags | (keep_up << 29)
    order = tl.cumsum(either, axis=0) - either
    count = tl.sum(either, axis=0)
    mine = listed + (split * tl.num_programs(0) + tile) * SLICE_SPAN
    packed = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (channel | flags).to(tl.int64)
    tl.store(mine + order, packed, mask=either != 0)
    if counting != 0:
        tl.store(counts + segment * SLICES + split, tl.sum(keep, axis=0))
        if PARTS == 2:
            tl.store(counts + (segment + 1) * SLICES + split, tl.sum(keep_up, axis=0))
    tl.debug_barrier()

    row = tl.arange(0, CHANNELS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    entry = tl.load(mine + row, mask=row < count, other=0, cache_modifier=".cg")
    block = kept_rows(entry, w, source, second, within, end, STRIDE, PARTS, WHOLE)
    upcoming = tl.load(mine + CHANNELS + row, mask=CHANNELS + row < count, other=0, cache_modifier=".cg")
    for done in range(0, count, CHANNELS):
        ahead = kept_rows(upcoming, w, source, second, within, end, STRIDE, PARTS, WHOLE)
        later = done + 2 * CHANNELS + row
        following = tl.load(mine + later, mask=later < count, other=0, cache_modifier=".cg")
        product = block.to(tl.float32) * (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)[:, None]
        total += tl.sum(tl.reshape(product, (CHANNELS // ROWS, ROWS, COLUMNS)), axis=0)
        entry = upcoming
        upcoming = following
        block = ahead
    tl.store(partial + split * row_stride + tile * COLUMNS + lane, tl.sum(total, axis=0))

    if arrives_last(arrivals + tile, SLICES):
        out_lane = tl.arange(0, half)
        column = start + out_lane
        index = tl.arange(0, MERGE)
        result = tl.zeros((half,), dtype=tl.float32)
        result_up = tl.zeros((half,), dtype=tl.float32)
        for low in tl.static_range(0, SLICES, MERGE):
            real = (low + index < SLICES)[:, None]
            pieces = partial + (low + index)[:, None] * row_stride + (tile * COLUMNS + out_lane)[None, :]
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
                    slot = counts + (segment + part) * SLICES + low + index
                    seen += tl.load(slot, mask=low + index < SLICES, other=0, cache_modifier=".cg")
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
    listed = workspace("listed", w_in, slices * len(tiles) * power_of_two(c.slice) * 2).view(torch.int64)
    counts = workspace("counts", w_in, 1 << 16).view(torch.int32)
    assert slices * len(select.segments) <= counts.numel(), "more channel slices than the count buffer holds"
    edges = [tile[0] for tile in tiles] + [tile[1] for tile in tiles] + [outputs, w_in.shape[1]]
    constants = {
        "N": outputs, "K": depth, "STRIDE": w_in.shape[1], "SLICE": c.slice, "SLICE_SPAN": power_of_two(c.slice), "SLICES": slices,
        "MERGE": min(32, power_of_two(slices)), "COLUMNS": c.columns, "CHANNELS": c.channels, "ROWS": min(c.channels, max(1, c.warps * 256 // c.columns)),
        "SPAN": power_of_two(depth),
        "PARTS": parts, "ALIGN": math.gcd(16, *edges), "WHOLE": all(end - start == c.columns // parts for start, end, _, _ in tiles),
        "NORMED": norm is not None, "BIASED": bias is not None, "ACCUMULATE": accumulate, "OVERLAP": overlaps(w_in),
    }  # fmt: skip
    table = torch.tensor(tiles, dtype=torch.int32, device=w_in.device)
    weight, eps = (norm.weight, norm.eps) if norm else (x, 0.0)
    arguments = (
        x, weight, w_in, y if bias is None else bias, y, select.thresholds, select.kept, table, listed, partial, counters(w_in), counts, eps,
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
