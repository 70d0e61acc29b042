"""Thresholded matrix-vector product in Triton: a program owns a few columns, selects for itself and keeps six blocks
in flight. GPUs of compute capability 9.0 and later run `sparse_rows.py` where its shapes allow.

Program t owns a column tile and walks over the input channels: no partial sums in memory, no atomics, no zeroing, no
launch for the selection. It either masks the rows it skips, or first lists the kept channels with their inputs
(worth its microsecond when a tile is wide and K moderate) and then spends no memory or arithmetic slot on skipped
ones. A tile of 32 columns makes reads of 64 bytes, the unit of the memory, so that even 4,096 outputs occupy a GPU
with 128 programs. Tiles never straddle a segment.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda import sparse_rows
from kernels.cuda.common import (
    column_tiles,
    inverse_rms,
    launcher,
    multiprocessors,
    norm_arguments,
    overlaps,
    power_of_two,
    wait_for_producer,
    workspace,
)
from kernels.norm import Norm
from kernels.selection import Selection


@dataclass(frozen=True)
class Config:
    """columns per tile (gate and up together when paired), channels per block (fewer than threads, or the loop meets
    barriers), warps, registers per thread (0: free), whether kept channels are listed first.
    """

    columns: int
    channels: int
    warps: int
    registers: int = 0
    listed: bool = False


def config(depth: int, columns: int, processors: int, item: int = 2) -> Config:
    """Return the launch configuration for a (depth, columns) input-major weight of `item` bytes per element: one wave
    of programs, at least 32 columns wide. Measured for two bytes; four halve the channels, so that six blocks take
    the same registers, and are untuned.
    """
    width = min(256, power_of_two(max(32, math.ceil(columns / processors))))
    if width >= 128 and depth <= 8192:
        return Config(width, min(8192 // item // width, power_of_two(depth)), 16, 128, True)
    return Config(width, min(16384 // item // width, power_of_two(depth)), 32)


@triton.jit
def take(x, weight, listed, channel, count, K: tl.constexpr, NORMED: tl.constexpr, LISTED: tl.constexpr):
    """Return what decides over the next block: list entries (twice), or inputs and the gains of the norm; zeros past
    the end.

    An entry holds the input's bits in its high word, and flags (bits 28 and 29) and the channel in its low word.
    """
    if LISTED:
        value = tl.load(listed + channel, mask=channel < count, other=0, cache_modifier=".cg")
        gain = value
    else:
        value = tl.load(x + channel, mask=channel < K, other=0.0)
        gain = value
        if NORMED:
            gain = tl.load(weight + channel, mask=channel < K, other=0.0)
    return value, gain


@triton.jit
def ask(
    value, gain, scale, limits, channel, w, source, second, live, K: tl.constexpr, STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr, NORMED: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Return the (CHANNELS, COLUMNS) weights of kept channels and the inputs that multiply them, zero elsewhere."""
    if LISTED:
        low = value.to(tl.int32)
        keep = (low >> 28) & 1 != 0
        keep_up = (low >> 29) & 1 != 0
        factor = (value >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        channel = low & 0x0FFFFFFF
    else:
        if NORMED:
            value = value * (gain * scale)
        size = tl.abs(value)
        keep = (channel < K) & ((size <= limits[0]) == 0)
        keep_up = (channel < K) & ((size <= limits[1]) == 0)
        factor = tl.where(keep | keep_up, value, 0.0)
    wanted = keep[:, None]
    if PARTS == 2:
        wanted = (wanted & (second == 0)) | (keep_up[:, None] & second)
    if not WHOLE:
        wanted = wanted & live
    pointers = w + channel.to(tl.int64)[:, None] * STRIDE + source
    return tl.load(pointers, mask=wanted, other=0.0, cache_modifier=".cg"), factor


@triton.jit
def add(total, block, factor, ROWS: tl.constexpr):
    """Add a block's products to (ROWS, COLUMNS) running sums; the rows of one thread meet in its registers."""
    product = block.to(tl.float32) * factor[:, None]
    pieces: tl.constexpr = block.shape[0] // ROWS
    return total + tl.sum(tl.reshape(product, (pieces, ROWS, block.shape[1])), axis=0)


@triton.jit
def thresholded(
    x, weight, w, bias, y, thresholds, kept, tiles, lists, eps,
    N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr, NORMED: tl.constexpr,
    LISTED: tl.constexpr, BIASED: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """PARTS = 1: y[n] (+)= sum over kept i of x[i] w[i, n]. PARTS = 2: y = silu(part 0) * part 1, part p at columns
    N p + n.

    With two parts a tile holds COLUMNS / 2 columns of each, side by side, each with its own threshold. A block of
    weights is asked for six blocks before it is added, what decides over it twelve blocks before.
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
    every = tl.arange(0, SPAN)
    exists = every < K
    listed = lists + tl.program_id(0) * SPAN
    if LISTED and NORMED:
        gains = tl.load(weight + every, mask=exists, other=0.0)
    wait_for_producer(OVERLAP)

    scale = 1.0
    count = K
    if LISTED:
        read = tl.load(x + every, mask=exists, other=0.0)
        if NORMED:
            read = read * (gains * (1.0 / tl.sqrt(tl.sum(read * read, axis=0) / K + eps)))
        chosen = (exists & ((tl.abs(read) <= limits[0]) == 0)).to(tl.int32)
        either = chosen
        flags = chosen << 28
        if PARTS == 2:
            chosen_up = (exists & ((tl.abs(read) <= limits[1]) == 0)).to(tl.int32)
            either = chosen | chosen_up
            flags = flags | (chosen_up << 29)
        upto = tl.cumsum(either, axis=0)
        count = tl.max(upto, axis=0)
        packed = (read.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (every | flags).to(tl.int64)
        tl.store(listed + upto - 1, packed, mask=either != 0)
        tl.debug_barrier()
    elif NORMED:
        scale = inverse_rms(x, eps, K, SPAN)

    c = tl.arange(0, CHANNELS)
    v0, g0 = take(x, weight, listed, c, count, K, NORMED, LISTED)
    v1, g1 = take(x, weight, listed, c + 1 * CHANNELS, count, K, NORMED, LISTED)
    v2, g2 = take(x, weight, listed, c + 2 * CHANNELS, count, K, NORMED, LISTED)
    v3, g3 = take(x, weight, listed, c + 3 * CHANNELS, count, K, NORMED, LISTED)
    v4, g4 = take(x, weight, listed, c + 4 * CHANNELS, count, K, NORMED, LISTED)
    v5, g5 = take(x, weight, listed, c + 5 * CHANNELS, count, K, NORMED, LISTED)
    b0, f0 = ask(v0, g0, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED)
    b1, f1 = ask(
        v1, g1, scale, limits, c + 1 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED
    )
    b2, f2 = ask(
        v2, g2, scale, limits, c + 2 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED
    )
    b3, f3 = ask(
        v3, g3, scale, limits, c + 3 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED
    )
    b4, f4 = ask(
        v4, g4, scale, limits, c + 4 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED
    )
    b5, f5 = ask(
        v5, g5, scale, limits, c + 5 * CHANNELS, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED
    )
    c += 6 * CHANNELS
    v0, g0 = take(x, weight, listed, c, count, K, NORMED, LISTED)
    v1, g1 = take(x, weight, listed, c + 1 * CHANNELS, count, K, NORMED, LISTED)
    v2, g2 = take(x, weight, listed, c + 2 * CHANNELS, count, K, NORMED, LISTED)
    v3, g3 = take(x, weight, listed, c + 3 * CHANNELS, count, K, NORMED, LISTED)
    v4, g4 = take(x, weight, listed, c + 4 * CHANNELS, count, K, NORMED, LISTED)
    v5, g5 = take(x, weight, listed, c + 5 * CHANNELS, count, K, NORMED, LISTED)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, count, 6 * CHANNELS):
        total = add(total, b0, f0, ROWS)
        b0, f0 = ask(v0, g0, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED)
        v0, g0 = take(x, weight, listed, c + 6 * CHANNELS, count, K, NORMED, LISTED)
        c += CHANNELS
        total = add(total, b1, f1, ROWS)
        b1, f1 = ask(v1, g1, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED)
        v1, g1 = take(x, weight, listed, c + 6 * CHANNELS, count, K, NORMED, LISTED)
        c += CHANNELS
        total = add(total, b2, f2, ROWS)
        b2, f2 = ask(v2, g2, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED)
        v2, g2 = take(x, weight, listed, c + 6 * CHANNELS, count, K, NORMED, LISTED)
        c += CHANNELS
        total = add(total, b3, f3, ROWS)
        b3, f3 = ask(v3, g3, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED)
        v3, g3 = take(x, weight, listed, c + 6 * CHANNELS, count, K, NORMED, LISTED)
        c += CHANNELS
        total = add(total, b4, f4, ROWS)
        b4, f4 = ask(v4, g4, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED)
        v4, g4 = take(x, weight, listed, c + 6 * CHANNELS, count, K, NORMED, LISTED)
        c += CHANNELS
        total = add(total, b5, f5, ROWS)
        b5, f5 = ask(v5, g5, scale, limits, c, w, source, second, live, K, STRIDE, PARTS, WHOLE, NORMED, LISTED)
        v5, g5 = take(x, weight, listed, c + 6 * CHANNELS, count, K, NORMED, LISTED)
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
        if not LISTED:
            again, gain = take(x, weight, listed, every, count, K, NORMED, LISTED)
            if NORMED:
                again = again * (gain * scale)
            chosen = (exists & ((tl.abs(again) <= limits[0]) == 0)).to(tl.int32)
            if PARTS == 2:
                chosen_up = (exists & ((tl.abs(again) <= limits[1]) == 0)).to(tl.int32)
        tl.store(kept + segment, tl.sum(chosen, axis=0))
        if PARTS == 2:
            tl.store(kept + segment + 1, tl.sum(chosen_up, axis=0))


def bind_thresholded(
    x: torch.Tensor, w_in: torch.Tensor, y: torch.Tensor, select: Selection, bias: torch.Tensor | None,
    norm: Norm | None, accumulate: bool, paired: bool, chosen: Config | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Bind the shared kernel of sparse_gemv (paired False) and sparse gate_up (paired True, segments (0, N, 2N))."""
    depth, outputs = w_in.shape[0], y.shape[0]
    segments = (0, outputs) if paired else select.segments
    if chosen is None and sparse_rows.takes(x, w_in, segments, norm, paired):
        return sparse_rows.bind(x, w_in, y, select, bias, norm, accumulate, paired)
    parts = 2 if paired else 1
    c = chosen or config(depth, w_in.shape[1], multiprocessors(w_in), w_in.element_size())
    tiles = column_tiles(segments, c.columns // parts)
    edges = [tile[0] for tile in tiles] + [tile[1] for tile in tiles] + [outputs, w_in.shape[1]]
    constants = {
        "N": outputs, "K": depth, "STRIDE": w_in.shape[1], "COLUMNS": c.columns, "CHANNELS": c.channels,
        "ROWS": min(c.channels, max(1, c.warps * 256 // c.columns)), "SPAN": power_of_two(depth), "PARTS": parts,
        "ALIGN": math.gcd(16, *edges), "WHOLE": all(end - start == c.columns // parts for start, end, _, _ in tiles),
        "NORMED": norm is not None, "BIASED": bias is not None, "ACCUMULATE": accumulate, "LISTED": c.listed,
        "OVERLAP": overlaps(w_in),
    }  # fmt: skip
    lists = workspace("lists", w_in, 2 * len(tiles) * power_of_two(depth) if c.listed else 2).view(torch.int64)
    table = torch.tensor(tiles, dtype=torch.int32, device=w_in.device)
    weight, eps = norm_arguments(norm, x)
    arguments = (x, weight, w_in, y if bias is None else bias, y, select.thresholds, select.kept, table, lists, eps)
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
    """Bind the thresholded product of n(x), written to y or added to it; n is the identity or `norm`. x (K,), w_in
    (K, N).
    """
    return bind_thresholded(x, w_in, y, select, bias, norm, accumulate, False, chosen)
