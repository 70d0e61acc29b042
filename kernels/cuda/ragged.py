"""Ragged decode attention in Triton: all blocks of all heads in one row, an equal share of it for every program.

A program's share may begin in the middle of one head and end in another; each head that it touches leaves one partial
result, in slot program + head, which no other pair has because both only grow along the row. The last program to
arrive at a head merges its slots in order, so the result does not depend on who that is.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cuda.attention import absorb
from kernels.cuda.common import (
    arrives_last,
    counters,
    launcher,
    multiprocessors,
    overlaps,
    power_of_two,
    wait_for_producer,
    workspace,
)
from kernels.ragged import Pages


@dataclass(frozen=True)
class Config:
    """programs in all, keys per block, slots merged at once, warps, pipeline stages."""

    programs: int
    block: int
    merge: int
    warps: int
    stages: int


def config(dim: int, processors: int) -> Config:
    """Return the launch configuration for every context: one program per multiprocessor, as in split-K attention."""
    return Config(processors, 128 if dim <= 128 else 64, 16, 4, 3 if dim <= 128 else 2)


@triton.jit
def merge(masses, outs, result, low, high, head, GROUP: tl.constexpr, D: tl.constexpr, D_SPAN: tl.constexpr,
          MERGE: tl.constexpr, MEMBERS: tl.constexpr):  # fmt: skip
    """Merge the partial results in slots low .. high - 1 of one KV head, in order; write its query heads' outputs."""
    piece = tl.arange(0, MERGE)
    member = tl.arange(0, MEMBERS)
    lane = tl.arange(0, D_SPAN)
    best = tl.full((MEMBERS,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((MEMBERS,), dtype=tl.float32)
    merged = tl.zeros((MEMBERS, D_SPAN), dtype=tl.float32)
    for slot in tl.range(low, high, MERGE):
        spots = ((slot + piece) * GROUP)[:, None] + member[None, :]
        present = ((slot + piece) < high)[:, None] & (member < GROUP)[None, :]
        local = tl.load(masses + spots, mask=present, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            outs + (spots * D)[:, :, None] + lane[None, None, :], mask=present[:, :, None] & (lane < D)[None, None, :],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(best, tl.max(local, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(local - base[None, :])
        shrink = tl.exp2(best - base)
        weight = weight * shrink + tl.sum(factor, axis=0)
        merged = merged * shrink[:, None] + tl.sum(part * factor[:, :, None], axis=0)
        best = higher
    final = result + (head * GROUP + member)[:, None] * D + lane[None, :]
    tl.store(final, merged / weight[:, None], mask=(member < GROUP)[:, None] & (lane < D)[None, :])


@triton.jit
def leave(masses, outs, slot, top, total, out, row, GROUP: tl.constexpr, D: tl.constexpr, D_SPAN: tl.constexpr):
    """Store one partial result (GROUP_SPAN, D_SPAN) and the logarithm of its softmax mass in a slot."""
    lane = tl.arange(0, D_SPAN)
    filled = tl.where(total > 0.0, total, 1.0)
    place = slot * GROUP + row
    tl.store(masses + place, tl.where(total == 0.0, float("-inf"), top + tl.log2(filled)), mask=row < GROUP)
    spot = outs + place[:, None] * D + lane[None, :]
    tl.store(spot, out / filled[:, None], mask=(row < GROUP)[:, None] & (lane < D)[None, :])


@triton.jit
def ragged_attention(
    source, keys, values, offsets, lengths, chosen, counts, result, masses, outs, arrivals, scale, MOST,
    KV_HEADS: tl.constexpr, HEAD_SPAN: tl.constexpr, GROUP: tl.constexpr, GROUP_SPAN: tl.constexpr, D: tl.constexpr,
    D_SPAN: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, MERGE: tl.constexpr, MEMBERS: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """source (heads, D) rotated queries; PAGE is 0 without pages. Lengths count entries before the step's own."""
    program = tl.program_id(0)
    wait_for_producer(OVERLAP)
    every = tl.arange(0, HEAD_SPAN)
    real = every < KV_HEADS
    entries = tl.load(lengths + every, mask=real, other=-1) + 1
    if PAGE > 0:
        pages = tl.load(counts + every, mask=real, other=0)
        entries = tl.where(pages < 0, entries, pages * PAGE)
    blocks = (entries + BLOCK - 1) // BLOCK
    before = tl.sum(tl.where(every[None, :] < every[:, None], blocks[None, :], 0), axis=1)
    share = tl.maximum(1, tl.cdiv(tl.sum(blocks, axis=0), PROGRAMS))
    block = program * share
    end = tl.minimum(block + share, tl.sum(blocks, axis=0))

    row = tl.arange(0, GROUP_SPAN)
    lane = tl.arange(0, D_SPAN)
    slot = tl.arange(0, BLOCK)
    in_dim = (lane < D)[None, :]
    while block < end:
        head = tl.sum((real & (before + blocks <= block)).to(tl.int32), axis=0)
        first = tl.sum(tl.where(every == head, before, 0), axis=0)
        after = first + tl.sum(tl.where(every == head, blocks, 0), axis=0)
        stop = tl.minimum(end, after)
        live = tl.load(lengths + head) + 1
        start = tl.load(offsets + head)
        query = tl.load(
            source + (head * GROUP + tl.minimum(row, GROUP - 1))[:, None] * D + lane[None, :], mask=in_dim, other=0.0
        )
        narrow = (query * (scale * 1.4426950408889634)).to(keys.dtype.element_ty)
        top = tl.full((GROUP_SPAN,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((GROUP_SPAN,), dtype=tl.float32)
        out = tl.zeros((GROUP_SPAN, D_SPAN), dtype=tl.float32)
        for b in tl.range(block - first, stop - first, num_stages=STAGES):
            entry = b * BLOCK + slot
            valid = entry < live
            if PAGE > 0:
                number = tl.load(counts + head)
                listed = (number >= 0) & (entry < number * PAGE)
                page = tl.load(chosen + head.to(tl.int64) * MOST + entry // PAGE, mask=listed, other=0)
                entry = tl.where(number < 0, entry, page * PAGE + entry % PAGE)
                valid = (entry < live) & ((number < 0) | listed)
            at = (start + entry.to(tl.int64))[:, None] * D + lane[None, :]
            mask = valid[:, None] & in_dim
            block_keys = tl.load(keys + at, mask=mask, other=0.0)
            block_values = tl.load(values + at, mask=mask, other=0.0)
            top, total, out = absorb(narrow, block_keys, block_values, valid, top, total, out)
        leave(masses, outs, program + head, top, total, out, row, GROUP, D, D_SPAN)
        low = first // share
        high = (after - 1) // share + 1
        if arrives_last(arrivals + head, high - low):
            merge(masses, outs, result, low + head, high + head, head, GROUP, D, D_SPAN, MERGE, MEMBERS)
        block = stop


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    capacity: int,
    pages: Pages | None,
    chosen: Config | None = None,
) -> Callable[[], object]:
    """Bind ragged attention; shapes are checked by `kernels.ragged.bind`. `capacity` is read on the device."""
    heads, dim = query.shape
    kv_heads = lengths.shape[0]
    group = heads // kv_heads
    c = chosen or config(dim, multiprocessors(keys))
    slots = (c.programs + kv_heads) * group
    masses, outs = workspace("masses", keys, slots), workspace("outs", keys, slots * dim)
    constants = {
        "KV_HEADS": kv_heads, "HEAD_SPAN": power_of_two(kv_heads), "GROUP": group,
        "GROUP_SPAN": max(16, power_of_two(group)), "D": dim, "D_SPAN": max(16, power_of_two(dim)), "BLOCK": c.block,
        "PROGRAMS": c.programs, "MERGE": c.merge, "MEMBERS": power_of_two(group),
        "PAGE": 0 if pages is None else pages.size, "STAGES": c.stages, "OVERLAP": overlaps(keys),
    }  # fmt: skip
    table, counts, most = (
        (lengths, lengths, 0) if pages is None else (pages.chosen, pages.counts, pages.chosen.shape[1])
    )
    arguments = (query, keys, values, offsets, lengths, table, counts, out, masses, outs, counters(keys), scale, most)
    return launcher(ragged_attention, (c.programs,), arguments, constants, c.warps, c.stages)
