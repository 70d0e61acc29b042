"""Masked up projection in Triton: a program decides over its rows from the gate, then reads the kept ones.

The rows are dealt to the programs in turn: each owns enough of them to find work whatever is dropped, and holds the
normed input in registers meanwhile: read again for every row, it would move more bytes from the L2 cache than the
weights do from memory. The next kept row is asked for before the one at hand is summed. The program that arrives last
adds the counts and the low-rank sums of all in index order. GPUs of compute capability 9.0 and later run
`masked_rows.py` where its shapes allow.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda import masked_rows
from kernels.cuda.common import (
    arrives_last,
    counters,
    launcher,
    multiprocessors,
    norm_arguments,
    overlaps,
    power_of_two,
    wait_for_producer,
    workspace,
)
from kernels.masked_mlp import LowRank
from kernels.norm import Norm

GATHERED = 256  # programs whose sums are added at a time


@dataclass(frozen=True)
class Config:
    """Programs that share the rows in turn, weights of one row read at once, warps, kept rows read at once."""

    programs: int
    block: int
    warps: int
    together: int = 1


def config(depth: int, processors: int, item: int = 2) -> Config:
    """Return the launch configuration for rows of `depth` weights on so many multiprocessors (the fastest of 16 tried
    on an H200 at Llama-3.1-8B's shape, docs/log-gpu-kernels.md). Weights of four bytes (`item`) take twice the warps
    for their registers, untuned.
    """
    block = min(4096, power_of_two(depth))
    return Config(4 * processors, block, max(1, item * block // 4096))


@triton.jit
def pick(first, place, keep, row, silu, count, TOGETHER: tl.constexpr):
    """Return the kept rows number `first` and following, their activated gates, and which of them exist."""
    slot = first + tl.arange(0, TOGETHER)
    hit = (place[None, :] == slot[:, None]) & keep[None, :]
    chosen = tl.sum(tl.where(hit, row[None, :], 0), axis=1)
    return chosen, tl.sum(tl.where(hit, silu[None, :], 0.0), axis=1), slot < count


@triton.jit
def masked_up(
    gate, x, weight, w, act, limit, kept, gate_b, up_b, down_a, counts, sums, arrivals, eps, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, RANK: tl.constexpr,
    SPAN: tl.constexpr, GATHERED: tl.constexpr, NORMED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """act[n] = silu(g[n]) (w[n] . n(x)) where |silu(g[n])| is above the limit; RANK > 0 adds the low-rank update."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = program + programs * tl.arange(0, ROWS)
    live = row < N
    k = tl.arange(0, BLOCK)
    j = tl.arange(0, SPAN)
    gain = tl.load(weight + k, mask=k < K, other=0.0) if NORMED else 1.0
    threshold = tl.load(limit)
    wait_for_producer(OVERLAP)

    g = tl.load(gate + row, mask=live, other=0.0)
    head = tl.load(x + k, mask=k < K, other=0.0)  # the first BLOCK inputs stay in registers
    if RANK > 0:
        used = j < RANK
        a_gate = tl.load(gate + N + j, mask=used, other=0.0)
        a_up = tl.load(gate + N + RANK + j, mask=used, other=0.0)
        own = row.to(tl.int64)[:, None] * RANK + j[None, :]
        inside = live[:, None] & (j < RANK)[None, :]
        g += tl.sum(tl.load(gate_b + own, mask=inside, other=0.0).to(tl.float32) * a_gate[None, :], axis=1)
    silu = g / (1.0 + tl.exp(-g))
    keep = live & ((tl.abs(silu) <= threshold) == 0)
    place = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    count = tl.sum(keep.to(tl.int32), axis=0)

    # One group of rows is always under way while the one before is summed.
    chosen, activated, valid = pick(0, place, keep, row, silu, count, TOGETHER)
    tile = tl.load(w + chosen.to(tl.int64)[:, None] * K + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0.0)
    if RANK > 0:
        there = valid[:, None] & (j < RANK)[None, :]
        factors = chosen.to(tl.int64)[:, None] * RANK + j[None, :]
        up_row = tl.load(up_b + factors, mask=there, other=0.0)
        down_row = tl.load(down_a + factors, mask=there, other=0.0)
    tl.store(act + row, tl.zeros((ROWS,), dtype=tl.float32), mask=live & (keep == 0))
    scale = 1.0
    if NORMED:
        square = head * head
        for step in tl.static_range(BLOCK, K, BLOCK):
            value = tl.load(x + step + k, mask=k < K - step, other=0.0)
            square += value * value
        scale = 1.0 / tl.sqrt(tl.sum(square, axis=0) / K + eps)
        head *= gain

    low_sums = tl.zeros((SPAN,), dtype=tl.float32)
    for first in range(0, count, TOGETHER):
        next_chosen, next_activated, next_valid = pick(first + TOGETHER, place, keep, row, silu, count, TOGETHER)
        pointers = w + next_chosen.to(tl.int64)[:, None] * K + k[None, :]
        ahead = tl.load(pointers, mask=next_valid[:, None] & (k < K)[None, :], other=0.0)
        if RANK > 0:
            next_there = next_valid[:, None] & (j < RANK)[None, :]
            factors = next_chosen.to(tl.int64)[:, None] * RANK + j[None, :]
            next_up_row = tl.load(up_b + factors, mask=next_there, other=0.0)
            next_down_row = tl.load(down_a + factors, mask=next_there, other=0.0)
        total = tile.to(tl.float32) * head[None, :]
        for step in tl.static_range(BLOCK, K, BLOCK):  # more than registers hold: read the inputs again
            exists = k < K - step
            value = tl.load(x + step + k, mask=exists, other=0.0)
            if NORMED:
                value *= tl.load(weight + step + k, mask=exists, other=0.0)
            rest = w + chosen.to(tl.int64)[:, None] * K + step + k[None, :]
            total += tl.load(rest, mask=valid[:, None] & exists[None, :], other=0.0).to(tl.float32) * value[None, :]
        up = tl.sum(total, axis=1) * scale
        if RANK > 0:
            up += tl.sum(up_row.to(tl.float32) * a_up[None, :], axis=1)
        result = activated * up
        tl.store(act + chosen, result, mask=valid)
        if RANK > 0:
            low_sums += tl.sum(tl.where(there, down_row.to(tl.float32) * result[:, None], 0.0), axis=0)
            up_row, down_row, there = next_up_row, next_down_row, next_there
        tile, chosen, activated, valid = ahead, next_chosen, next_activated, next_valid
    tl.store(counts + program, count)
    if RANK > 0:
        tl.store(sums + program * SPAN + j, low_sums)

    if arrives_last(arrivals, programs):
        rows = tl.zeros((GATHERED,), dtype=tl.int32)
        low = tl.zeros((GATHERED, SPAN), dtype=tl.float32)
        for first in range(0, programs, GATHERED):
            p = first + tl.arange(0, GATHERED)
            rows += tl.load(counts + p, mask=p < programs, other=0, cache_modifier=".cg")
            if RANK > 0:
                at = sums + p[:, None] * SPAN + j[None, :]
                low += tl.load(at, mask=(p < programs)[:, None], other=0.0, cache_modifier=".cg")
        tl.store(kept, tl.sum(rows, axis=0))
        if RANK > 0:
            tl.store(act + N + j, tl.sum(low, axis=0), mask=j < RANK)


def bind(
    gate: torch.Tensor, x: torch.Tensor, w: torch.Tensor, act: torch.Tensor, limit: torch.Tensor, kept: torch.Tensor,
    norm: Norm | None, low: LowRank | None, chosen: Config | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Bind the masked up projection; shapes are checked by `kernels.masked_mlp.bind`."""
    if chosen is None and masked_rows.takes(x, w, norm, low):
        return masked_rows.bind(gate, x, w, act, limit, kept, norm, low)
    width, depth = w.shape
    rank = 0 if low is None else low.rank
    c = chosen or config(depth, multiprocessors(w), w.element_size())
    programs = min(c.programs, width)
    span = power_of_two(max(rank, 1))
    constants = {
        "K": depth, "ROWS": power_of_two(triton.cdiv(width, programs)), "BLOCK": c.block, "TOGETHER": c.together,
        "RANK": rank, "SPAN": span,
        "GATHERED": GATHERED, "NORMED": norm is not None, "OVERLAP": overlaps(w),
    }  # fmt: skip
    counts = workspace("masked rows", w, programs).view(torch.int32)
    sums = workspace("low rank", w, programs * span)
    weight, eps = norm_arguments(norm, x)
    factors = (w, w, w) if low is None else (low.gate_b, low.up_b, low.down_a)
    arguments = (
        gate, x, weight, w, act, limit, kept, *factors, counts, sums, counters(w), eps, width,
    )  # fmt: skip
    return launcher(masked_up, (programs,), arguments, constants, c.warps)
