"""Attention over pruned channels in Triton: packed vectors are expanded in registers, the dense tail follows.

A grid of KV heads x splits; the blocks of a head's packed part, then those of its tail, are dealt to its splits in
turn. The rank of a channel among the kept ones is a running sum of mask bits, so a vector costs its stored bytes and
some forty integer operations per channel.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.channels import Pruned, Tail
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
from kernels.cuda.ragged import leave, merge


@dataclass(frozen=True)
class Config:
    """splits per KV head, vectors per block, slots merged at once, warps, pipeline stages."""

    splits: int
    block: int
    merge: int
    warps: int
    stages: int


def config(kv_heads: int, dim: int, processors: int) -> Config:
    """Return the launch configuration: two programs per multiprocessor, since expanding waits on arithmetic."""
    splits = max(1, 2 * processors // kv_heads)
    splits = 1 << (splits.bit_length() - 1)
    return Config(splits, 64 if dim <= 128 else 32, min(16, splits), 4, 2)


@triton.jit
def expanded(kept, mask, signs, fill, constant, token, valid, WIDTH, WORDS, SIGN_BYTES, D: tl.constexpr,
             D_SPAN: tl.constexpr, SIGNED: tl.constexpr, FILLED: tl.constexpr):  # fmt: skip
    """Return (BLOCK, D_SPAN) vectors of the tokens (int64 numbers over all heads), 0 in lanes past D."""
    lane = tl.arange(0, D_SPAN)
    live = valid[:, None] & (lane < D)[None, :]
    word = tl.load(mask + token[:, None] * WORDS + (lane // 32)[None, :], mask=live, other=0)
    bit = (word >> (lane % 32)[None, :]) & 1
    rank = tl.cumsum(bit, axis=1) - bit
    stored = tl.load(kept + token[:, None] * WIDTH + rank, mask=live & (bit == 1), other=0.0).to(tl.float32)
    if FILLED:
        value = tl.load(fill + token, mask=valid, other=0.0).to(tl.float32)[:, None] + tl.zeros_like(stored)
    else:
        value = constant + tl.zeros_like(stored)
    if SIGNED:
        gone = lane[None, :] - rank
        byte = tl.load(signs + token[:, None] * SIGN_BYTES + gone // 8, mask=live & (bit == 0), other=0).to(tl.int32)
        value = tl.where(((byte >> (gone % 8)) & 1) == 1, -value, value)
    return tl.where(live, tl.where(bit == 1, stored, value), 0.0)


@triton.jit
def pruned_attention(
    source, kept, mask, shared, signs, fill, constant, values, value_mask, tail_keys, tail_values, lengths, result,
    masses, outs, arrivals, scale, TOKENS, CAPACITY, WIDTH, WORDS, SIGN_BYTES, VALUE_WIDTH,
    GROUP: tl.constexpr, GROUP_SPAN: tl.constexpr, D: tl.constexpr, D_SPAN: tl.constexpr, WIDTH_SPAN: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, MERGE: tl.constexpr, MEMBERS: tl.constexpr, SHARED: tl.constexpr,
    SIGNED: tl.constexpr, FILLED: tl.constexpr, SHORT_VALUES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """source (heads, D) rotated queries. SHARED: all tokens of a head keep the channels in shared (kv_heads, WIDTH)."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    wait_for_producer(OVERLAP)
    live = tl.load(lengths + head) + 1
    packed_blocks = tl.cdiv(TOKENS, BLOCK)
    blocks = packed_blocks + tl.cdiv(live, BLOCK)
    row = tl.arange(0, GROUP_SPAN)
    lane = tl.arange(0, D_SPAN)
    slot = tl.arange(0, BLOCK)
    in_dim = (lane < D)[None, :]
    own = source + (head * GROUP + tl.minimum(row, GROUP - 1))[:, None] * D
    query = tl.load(own + lane[None, :], mask=in_dim, other=0.0) * (scale * 1.4426950408889634)
    narrow = query.to(tail_keys.dtype.element_ty)
    if SHARED:
        narrow_lane = tl.arange(0, WIDTH_SPAN)
        there = narrow_lane < WIDTH
        channel = tl.load(shared + head * WIDTH + narrow_lane, mask=there, other=0)
        short = tl.load(own + channel[None, :], mask=there[None, :], other=0.0) * (scale * 1.4426950408889634)
        short_query = short.to(tail_keys.dtype.element_ty)
    top = tl.full((GROUP_SPAN,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_SPAN,), dtype=tl.float32)
    out = tl.zeros((GROUP_SPAN, D_SPAN), dtype=tl.float32)
    first = head.to(tl.int64) * TOKENS
    for block in tl.range(split, packed_blocks, SPLITS):
        entry = block * BLOCK + slot
        valid = entry < TOKENS
        token = first + entry
        if SHORT_VALUES:
            block_values = expanded(values, value_mask, signs, fill, 0.0, token, valid, VALUE_WIDTH, WORDS, SIGN_BYTES,
                                    D, D_SPAN, False, False).to(tail_values.dtype.element_ty)  # fmt: skip
        else:
            block_values = tl.load(values + token[:, None] * D + lane[None, :], mask=valid[:, None] & in_dim, other=0.0)
        if SHARED:
            place = kept + token[:, None] * WIDTH + narrow_lane[None, :]
            block_keys = tl.load(place, mask=valid[:, None] & there[None, :], other=0.0)
            top, total, out = absorb(short_query, block_keys, block_values, valid, top, total, out)
        else:
            block_keys = expanded(kept, mask, signs, fill, constant, token, valid, WIDTH, WORDS, SIGN_BYTES, D, D_SPAN,
                                  SIGNED, FILLED).to(tail_keys.dtype.element_ty)  # fmt: skip
            top, total, out = absorb(narrow, block_keys, block_values, valid, top, total, out)
    # The splits that got no last packed block take the first of the tail.
    start = (split - packed_blocks % SPLITS + SPLITS) % SPLITS
    for block in tl.range(start, tl.cdiv(live, BLOCK), SPLITS):
        entry = block * BLOCK + slot
        valid = entry < live
        at = (head.to(tl.int64) * CAPACITY + entry)[:, None] * D + lane[None, :]
        there_too = valid[:, None] & in_dim
        block_keys = tl.load(tail_keys + at, mask=there_too, other=0.0)
        block_values = tl.load(tail_values + at, mask=there_too, other=0.0)
        top, total, out = absorb(narrow, block_keys, block_values, valid, top, total, out)
    leave(masses, outs, head * SPLITS + split, top, total, out, row, GROUP, D, D_SPAN)
    if arrives_last(arrivals + head, SPLITS):
        used = tl.minimum(SPLITS, blocks)
        merge(masses, outs, result, head * SPLITS, head * SPLITS + used, head, GROUP, D, D_SPAN, MERGE, MEMBERS)


def bind(
    query: torch.Tensor, packed: Pruned, tail: Tail, out: torch.Tensor, scale: float, chosen: Config | None = None
) -> Callable[[], object]:
    """Bind attention over a pruned prompt and its tail; shapes are checked by `kernels.channels.bind`."""
    heads, dim = query.shape
    kv_heads, capacity, _ = tail[0].shape
    group, (tokens, width) = heads // kv_heads, packed.kept.shape[1:]
    c = chosen or config(kv_heads, dim, multiprocessors(tail[0]))
    slots = kv_heads * c.splits * group
    masses, outs = workspace("masses", tail[0], slots), workspace("outs", tail[0], slots * dim)
    constants = {
        "GROUP": group, "GROUP_SPAN": max(16, power_of_two(group)), "D": dim, "D_SPAN": max(16, power_of_two(dim)),
        "WIDTH_SPAN": max(16, power_of_two(width)), "BLOCK": c.block, "SPLITS": c.splits, "MERGE": c.merge,
        "MEMBERS": power_of_two(group), "SHARED": packed.channels is not None, "SIGNED": packed.signs is not None,
        "FILLED": packed.fill is not None, "SHORT_VALUES": packed.value_mask is not None, "OVERLAP": overlaps(tail[0]),
    }  # fmt: skip

    def given(tensor: torch.Tensor | None) -> torch.Tensor:
        return packed.kept if tensor is None else tensor

    arguments = (
        query, packed.kept, given(packed.mask), given(packed.channels), given(packed.signs), given(packed.fill),
        packed.constant, packed.values, given(packed.value_mask), *tail, out, masses, outs, counters(tail[0]), scale,
        tokens, capacity, width, -(-dim // 32), -(-(dim - width) // 8), packed.values.shape[2],
    )  # fmt: skip
    return launcher(pruned_attention, (kv_heads, c.splits), arguments, constants, c.warps, c.stages)
