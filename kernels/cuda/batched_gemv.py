"""Products of a batch in Triton: sixteen sequences are the rows of a tensor-core product, so every weight is read once.

Weights are half precision, inputs float32. A first launch norms the inputs and leaves each as a half and what that
leaves, again as a half: two products. In bfloat16 the two keep 8 + 8 bits, about 16, over the range of float32. In
float16 they keep 11 + 11, about 22; below about 2^-3 the remainder is subnormal, and the error is about 2^-25 whatever
the input's size. Beyond 65,504 a float16 input is not finite, nor is the result, which shows. Behind a norm (qkv, gate
and up) such inputs do not occur; those of o and down have no norm before them. Unused rows are zero.

A program owns a tile of outputs and a share of the inputs, so that several programs are on a multiprocessor; the last
one of a tile to arrive adds the sums of all in order. In the thresholded form (`batched_sparse_gemv.py`) the first
launch also decides, for every segment of columns, and leaves a word per channel whose bits say which sequences activate
it. A program keeps one bit for each of its channels in registers before it asks for weights: what no sequence activates
is not read, and no block of weights waits for a decision.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import Launch, ShapeError, in_order
from kernels.cuda.common import (
    arrives_last,
    column_tiles,
    counters,
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

ROWS = 16  # of a tensor-core product
CHUNK = 256  # channels that a program of the first launch takes
WORD = 32  # blocks of inputs that a program may take: it keeps one bit for each
RESIDENT = 4  # programs that should be on a multiprocessor


@dataclass(frozen=True)
class Config:
    """Outputs of a program, inputs of a block, warps, blocks under way, programs that share a tile's inputs."""

    outputs: int
    depth: int
    warps: int
    stages: int
    splits: int


def config(depth: int, outputs: int, processors: int) -> Config:
    """Return the launch configuration of a product of `depth` inputs (the fastest of six tried on an H200 at
    Llama-3.1-8B's shapes, docs/log-gpu-kernels.md).
    """
    block, tile = 128, 64
    blocks, tiles = math.ceil(depth / block), math.ceil(outputs / tile)
    splits = max(math.ceil(blocks / WORD), min(blocks, round(RESIDENT * processors / tiles)), 1)
    return Config(tile, block, 4, 4, splits)


@triton.jit
def halve(
    x, weight, thresholds, halves, active, eps, B, S,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, NORMED: tl.constexpr,
    MASKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """halves[s, part, b, k], zero where MASKED and sequence b drops k, and active[s, k] with bit b set elsewhere."""
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
        mine = here
        if MASKED:
            mine = here & ((tl.abs(value) <= tl.load(thresholds + s)) == 0)
            tl.store(active + s * K + k, tl.sum(mine.to(tl.int32) << b[:, None], axis=0), mask=k < K)
        kept = tl.where(mine, value, 0.0)
        high = kept.to(halves.dtype.element_ty)
        place = halves + (s * 2 * ROWS + b)[:, None] * K + k[None, :]
        tl.store(place, high, mask=here)
        tl.store(place + ROWS * K, (kept - high.to(tl.float32)).to(halves.dtype.element_ty), mask=here)


@triton.jit
def count(active, kept, own, segment, B, S, K: tl.constexpr, SPAN: tl.constexpr):
    """Leave how many channels of a segment any sequence activates, and how many each."""
    every = tl.arange(0, SPAN)
    words = tl.load(active + segment * K + every, mask=every < K, other=0)
    tl.store(kept + segment, tl.sum((words != 0).to(tl.int32), axis=0))
    for b in range(0, B):
        tl.store(own + b * S + segment, tl.sum((words >> b) & 1, axis=0))


@triton.jit
def product(
    halves, active, w, bias, y, kept, own, tiles, parts, arrivals, TILES, N, B, S,
    K: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    EACH: tl.constexpr, SPLITS: tl.constexpr, ALIGN: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr,
    ACCUMULATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[b, n] (+)= sum_k (high + low)[b, k] w[n, k], or w[k, n] where MASKED: there the last programs count. A program
    takes EACH blocks of DEPTH inputs.
    """
    index = tl.program_id(0)
    wait_for_producer(OVERLAP)
    if MASKED:
        if index >= TILES * SPLITS:
            count(active, kept, own, index - TILES * SPLITS, B, S, K, SPAN)
            return
    tile, share = index // SPLITS, index % SPLITS
    # Vector loads of w need to know that a tile begins and ends at whole vectors.
    start, end = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    start, end = tl.multiple_of(start, ALIGN), tl.multiple_of(end, ALIGN)
    segment = tl.load(tiles + tile * 4 + 2)
    n = start + tl.arange(0, OUTPUTS)
    b = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    first = share * EACH * DEPTH
    bits = tl.zeros((DEPTH,), dtype=tl.int32)
    if MASKED:
        for block in tl.static_range(EACH):
            at = first + block * DEPTH + k
            bits |= (tl.load(active + segment * K + at, mask=at < K, other=0) != 0).to(tl.int32) << block
    high_at = halves + (segment * 2 * ROWS + b)[:, None] * K + k[None, :]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for block in range(0, EACH):
        step = first + block * DEPTH
        inside = step + k < K
        if MASKED:
            place = (step + k).to(tl.int64)[:, None] * N + n[None, :]
            wanted = inside & (((bits >> block) & 1) != 0)
        else:
            place = n.to(tl.int64)[None, :] * K + (step + k)[:, None]
            wanted = inside
        weights = tl.load(w + place, mask=wanted[:, None] & (n < end)[None, :], other=0.0)
        there = (b < B)[:, None] & inside[None, :]
        high = tl.load(high_at + step, mask=there, other=0.0)
        low = tl.load(high_at + ROWS * K + step, mask=there, other=0.0)
        total = tl.dot(low, weights, tl.dot(high, weights, total))

    if SPLITS > 1:
        within = b[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        mine = parts + tile * SPLITS * ROWS * OUTPUTS + within
        tl.store(mine + share * ROWS * OUTPUTS, total)
        if not arrives_last(arrivals + tile, SPLITS):
            return
        total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for other in range(0, SPLITS):
            total += tl.load(mine + other * ROWS * OUTPUTS, cache_modifier=".cg")
    live = (b < B)[:, None] & (n < end)[None, :]
    out = y + b.to(tl.int64)[:, None] * N + n[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < end, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:
        total += tl.load(out, mask=live, other=0.0)
    tl.store(out, total, mask=live)


def bind(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None, accumulate: bool,
    chosen: Config | None = None,
) -> Launch:  # fmt: skip
    """Bind the product of a batch; shapes are checked by `kernels.batched_gemv.bind`."""
    none = torch.zeros(1, dtype=torch.int32, device=w.device)
    select = Selection(none.float(), (0, w.shape[0]), none)
    return bind_product(x, w, y, select, None, bias, norm, accumulate, chosen)


def bind_product(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, select: Selection, own: torch.Tensor | None,
    bias: torch.Tensor | None, norm: Norm | None, accumulate: bool, chosen: Config | None = None,
) -> Launch:  # fmt: skip
    """Bind either form: own None reads all of w (N, K), else the union of w (K, N). Raises ShapeError for weights that
    tensor cores would cut to fewer bits.
    """
    if w.dtype not in (torch.float16, torch.bfloat16):
        raise ShapeError(f"w has dtype {w.dtype}; products of a batch on a GPU take float16 and bfloat16")
    batch, depth = x.shape
    masked, segments, outputs, overlap = own is not None, len(select.segments) - 1, y.shape[1], overlaps(w)
    c = chosen or config(depth, outputs, multiprocessors(w))
    each = math.ceil(math.ceil(depth / c.depth) / c.splits)
    if masked and each > WORD:
        raise ValueError(f"{c.splits} programs share {depth} inputs in blocks of {c.depth}; a program takes {WORD}")
    halves = workspace("halves", w, segments * ROWS * depth + 1).view(w.dtype)
    active = workspace("active", w, segments * depth).view(torch.int32)
    tiles = column_tiles(select.segments, c.outputs)
    parts = workspace("parts of a batch", w, len(tiles) * c.splits * ROWS * c.outputs)
    weight, eps = norm_arguments(norm, x)
    common = {"K": depth, "SPAN": power_of_two(depth), "ROWS": ROWS, "MASKED": masked, "OVERLAP": overlap}
    first = launcher(
        halve, (triton.cdiv(depth, CHUNK),), (x, weight, select.thresholds, halves, active, eps, batch, segments),
        {**common, "CHUNK": CHUNK, "NORMED": norm is not None}, 4,
    )  # fmt: skip
    table = torch.tensor(tiles, dtype=torch.int32, device=w.device)
    arguments = (
        halves, active, w, y if bias is None else bias, y, select.kept, select.kept if own is None else own, table,
        parts, counters(w), len(tiles), outputs, batch, segments,
    )  # fmt: skip
    constants = {
        **common, "OUTPUTS": c.outputs, "DEPTH": c.depth, "EACH": each, "SPLITS": c.splits,
        "ALIGN": math.gcd(16, outputs, *select.segments), "BIASED": bias is not None, "ACCUMULATE": accumulate,
    }  # fmt: skip
    grid = (len(tiles) * c.splits + (segments if masked else 0),)
    return in_order([first, launcher(product, grid, arguments, constants, c.warps, c.stages)])
