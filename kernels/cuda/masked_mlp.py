"""Masked up projection in Triton: a program decides over its rows from the gate, then reads the kept ones.

A program owns enough rows to find work whatever is dropped, and holds the normed input in registers meanwhile: read
again for every row, it would move more bytes from the L2 cache than the weights do from memory. The program that
arrives last adds the counts and the low-rank sums of all in index order.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda.common import arrives_last, counters, launcher, overlaps, power_of_two, wait_for_producer, workspace
from kernels.masked_mlp import LowRank
from kernels.norm import Norm

GATHERED = 256  # programs whose sums are added at a time


@dataclass(frozen=True)
class Config:
    """rows that a program owns, weights of one row read at once, warps, kept rows read at once."""

    rows: int
    block: int
    warps: int
    together: int = 1


def config(depth: int, rank: int = 0, item: int = 2) -> Config:
    """Return the launch configuration for rows of `depth` weights: many small programs, a row at a time each (the
    fastest of 25 tried on an H200 at Llama-3.1-8B's shape; with an update of rank 16 of 8, docs/log-gpu-kernels.md).
    Weights of four bytes (`item`) take twice the warps for their registers, untuned.
    """
    block = min(4096, power_of_two(depth))
    return Config(8 if rank else 16, block, max(1, item * block // 4096))


@triton.jit
def masked_up(
    gate, x, weight, w, act, limit, kept, gate_b, up_b, down_a, counts, sums, arrivals, eps, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, RANK: tl.constexpr,
    SPAN: tl.constexpr, GATHERED: tl.constexpr, NORMED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """act[n] = silu(g[n]) (w[n] . n(x)) where |silu(g[n])| is above the limit; RANK > 0 adds the low-rank update."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = program * ROWS + tl.arange(0, ROWS)
    live = row < N
    k = tl.arange(0, BLOCK)
    j = tl.arange(0, SPAN)
    wait_for_producer(OVERLAP)

    threshold = tl.load(limit)
    g = tl.load(gate + row, mask=live, other=0.0)
    if RANK > 0:
        used = j < RANK
        a_gate = tl.load(gate + N + j, mask=used, other=0.0)
        a_up = tl.load(gate + N + RANK + j, mask=used, other=0.0)
        own = row.to(tl.int64)[:, None] * RANK + j[None, :]
        inside = live[:, None] & (j < RANK)[None, :]
        g += tl.sum(tl.load(gate_b + own, mask=inside, other=0.0).to(tl.float32) * a_gate[None, :], axis=1)
    silu = g / (1.0 + tl.exp(-g))
    keep = live & ((tl.abs(silu) <= threshold) == 0)
    tl.store(act + row, tl.zeros((ROWS,), dtype=tl.float32), mask=live & (keep == 0))
    place = tl.cumsum(keep.to(tl.int32), axis=0) - 1
    count = tl.sum(keep.to(tl.int32), axis=0)

    square = tl.zeros((BLOCK,), dtype=tl.float32)
    value = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in tl.static_range(0, K, BLOCK):
        exists = k < K - step
        value = tl.load(x + step + k, mask=exists, other=0.0)
        if NORMED:
            square += value * value
            value *= tl.load(weight + step + k, mask=exists, other=0.0)
    scale = 1.0
    if NORMED:
        scale = 1.0 / tl.sqrt(tl.sum(square, axis=0) / K + eps)

    low_sums = tl.zeros((SPAN,), dtype=tl.float32)
    for first in range(0, count, TOGETHER):
        slot = first + tl.arange(0, TOGETHER)
        valid = slot < count
        hit = (place[None, :] == slot[:, None]) & keep[None, :]
        chosen = tl.sum(tl.where(hit, row[None, :], 0), axis=1)
        activated = tl.sum(tl.where(hit, silu[None, :], 0.0), axis=1)
        if RANK > 0:  # asked for before the row itself, so that both are under way together
            factors = chosen.to(tl.int64)[:, None] * RANK + j[None, :]
            there = valid[:, None] & (j < RANK)[None, :]
            up_row = tl.load(up_b + factors, mask=there, other=0.0).to(tl.float32)
            down_row = tl.load(down_a + factors, mask=there, other=0.0).to(tl.float32)
        pointers = w + chosen.to(tl.int64)[:, None] * K + k[None, :]
        total = tl.zeros((TOGETHER, BLOCK), dtype=tl.float32)
        for step in tl.static_range(0, K, BLOCK):
            exists = k < K - step
            tile = tl.load(pointers + step, mask=valid[:, None] & exists[None, :], other=0.0)
            if K > BLOCK:  # more than registers hold: read again
                value = tl.load(x + step + k, mask=exists, other=0.0)
                if NORMED:
                    value *= tl.load(weight + step + k, mask=exists, other=0.0)
            total += tile.to(tl.float32) * value[None, :]
        up = tl.sum(total, axis=1) * scale
        if RANK > 0:
            up += tl.sum(up_row * a_up[None, :], axis=1)
        result = activated * up
        tl.store(act + chosen, result, mask=valid)
        if RANK > 0:
            low_sums += tl.sum(tl.where(there, down_row * result[:, None], 0.0), axis=0)
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
    width, depth = w.shape
    rank = 0 if low is None else low.rank
    c = chosen or config(depth, rank, w.element_size())
    programs = triton.cdiv(width, c.rows)
    span = power_of_two(max(rank, 1))
    constants = {
        "K": depth, "ROWS": c.rows, "BLOCK": c.block, "TOGETHER": c.together, "RANK": rank, "SPAN": span,
        "GATHERED": GATHERED, "NORMED": norm is not None, "OVERLAP": overlaps(w),
    }  # fmt: skip
    counts = workspace("masked rows", w, programs).view(torch.int32)
    sums = workspace("low rank", w, programs * span)
    weight, eps = (norm.weight, norm.eps) if norm else (x, 0.0)
    factors = (w, w, w) if low is None else (low.gate_b, low.up_b, low.down_a)
    arguments = (
        gate, x, weight, w, act, limit, kept, *factors, counts, sums, counters(w), eps, width,
    )  # fmt: skip
    return launcher(masked_up, (programs,), arguments, constants, c.warps)
