"""Thresholded products of a batch in Triton: the channels that no sequence activates are not read.

A first launch norms the inputs, decides, and leaves for every segment of columns the inputs of each sequence in two
halves (zero where it does not activate the channel) and a word of bits that says which sequences do. The product then
decides nothing: a block of weights waits for its words alone, and several blocks are under way.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import Launch
from kernels.cuda.batched_gemv import ROWS, Config, require_half, store_rows
from kernels.cuda.common import column_tiles, launcher, overlaps, power_of_two, wait_for_producer, workspace
from kernels.cuda.rows import chain
from kernels.norm import Norm
from kernels.selection import Selection

CHUNK = 256  # channels that a program of the first launch decides over
CONFIG = Config(32, 128, 4, 4)


@triton.jit
def _decide(
    x, weight, thresholds, halves, active, eps, B, S,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """halves[s, part, b, k] and active[s, k]: bit b is set where not |z[b, k]| <= thresholds[s]."""
    k = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    b = tl.arange(0, ROWS)
    here = (b < B)[:, None] & (k < K)[None, :]
    wait_for_producer(OVERLAP)
    value = tl.load(x + b[:, None] * K + k[None, :], mask=here, other=0.0)
    if NORMED:
        every = tl.arange(0, SPAN)
        scale = tl.zeros((ROWS,), dtype=tl.float32)
        for one in range(0, B):
            row = tl.load(x + one * K + every, mask=every < K, other=0.0)
            scale = tl.where(b == one, 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / K + eps), scale)
        value *= scale[:, None] * tl.load(weight + k, mask=k < K, other=0.0)[None, :]
    for s in range(0, S):
        mine = here & ((tl.abs(value) <= tl.load(thresholds + s)) == 0)
        kept = tl.where(mine, value, 0.0)
        high = kept.to(halves.dtype.element_ty)
        place = halves + (s * 2 * ROWS + b)[:, None] * K + k[None, :]
        tl.store(place, high, mask=here)
        tl.store(place + ROWS * K, (kept - high.to(tl.float32)).to(halves.dtype.element_ty), mask=here)
        tl.store(active + s * K + k, tl.sum(mine.to(tl.int32) << b[:, None], axis=0), mask=k < K)


@triton.jit
def _union(
    halves, active, w, bias, y, kept, own, tiles, N, B, S,
    K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[b, n] (+)= sum over k with any bit set of (high + low)[b, k] w[k, n]; w (K, N) input-major."""
    tile = tl.program_id(0) * 4
    start, end = tl.load(tiles + tile), tl.load(tiles + tile + 1)
    segment, counting = tl.load(tiles + tile + 2), tl.load(tiles + tile + 3)
    n = start + tl.arange(0, OUTPUTS)
    b = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    wait_for_producer(OVERLAP)
    words = active + segment * K
    high_at = halves + (segment * 2 * ROWS + b)[:, None] * K + k[None, :]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for step in range(0, K, DEPTH):
        inside = step + k < K
        wanted = tl.load(words + step + k, mask=inside, other=0) != 0
        place = (step + k).to(tl.int64)[:, None] * N + n[None, :]
        weights = tl.load(w + place, mask=wanted[:, None] & (n < end)[None, :], other=0.0)
        there = (b < B)[:, None] & inside[None, :]
        high = tl.load(high_at + step, mask=there, other=0.0)
        low = tl.load(high_at + ROWS * K + step, mask=there, other=0.0)
        total = tl.dot(low, weights, tl.dot(high, weights, total))
    store_rows(total, bias, y, n, b, end, N, B, BIASED, ACCUMULATE)
    if counting != 0:
        mine = tl.zeros((ROWS,), dtype=tl.int32)
        union = 0
        for step in range(0, K, DEPTH):
            word = tl.load(words + step + k, mask=step + k < K, other=0)
            mine += tl.sum((word[None, :] >> b[:, None]) & 1, axis=1)
            union += tl.sum((word != 0).to(tl.int32), axis=0)
        tl.store(kept + segment, union)
        tl.store(own + b * S + segment, mine, mask=b < B)


def bind(
    x: torch.Tensor, w_in: torch.Tensor, y: torch.Tensor, select: Selection, own: torch.Tensor,
    bias: torch.Tensor | None, norm: Norm | None, accumulate: bool, chosen: Config | None = None,
) -> Launch:  # fmt: skip
    """Bind the thresholded product; shapes are checked by `kernels.batched_sparse_gemv.bind`."""
    require_half(w_in)
    batch, depth = x.shape
    segments, c, overlap = len(select.segments) - 1, chosen or CONFIG, overlaps(w_in)
    elements = segments * 2 * ROWS * depth
    halves = workspace("halves", w_in, elements // 2 + 1).view(w_in.dtype)
    active = workspace("active", w_in, segments * depth).view(torch.int32)
    weight, eps = (norm.weight, norm.eps) if norm is not None else (x, 0.0)
    decide = launcher(
        _decide,
        (triton.cdiv(depth, CHUNK),),
        (x, weight, select.thresholds, halves, active, eps, batch, segments),
        {"K": depth, "SPAN": power_of_two(depth), "ROWS": ROWS, "CHUNK": CHUNK, "NORMED": norm is not None,
         "OVERLAP": overlap},
        4,
    )  # fmt: skip
    tiles = column_tiles(select.segments, c.outputs)
    table = torch.tensor(tiles, dtype=torch.int32, device=w_in.device)
    arguments = (
        halves, active, w_in, y if bias is None else bias, y, select.kept, own, table, w_in.shape[1], batch, segments,
    )  # fmt: skip
    constants = {
        "K": depth, "ROWS": ROWS, "OUTPUTS": c.outputs, "DEPTH": c.depth, "BIASED": bias is not None,
        "ACCUMULATE": accumulate, "OVERLAP": overlap,
    }  # fmt: skip
    return chain([decide, launcher(_union, (len(tiles),), arguments, constants, c.warps, c.stages)])
