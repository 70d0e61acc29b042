"""Split-K decode attention in Triton, alone or with rotation and append in the same launch.

A grid of KV heads x splits; a split owns consecutive blocks of the live entries, the length being read on the
device, so one captured launch serves every context. Each program leaves its output and the logarithm of its softmax
mass per query head; the last split of a head to arrive merges them in split order. Query heads of a group share the
key and value loads.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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

Cache = tuple[torch.Tensor, torch.Tensor]
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Config:
    """splits per KV head, keys per block, splits merged at once, warps, pipeline stages, registers per thread (0:
    free), whether the blocks of a head are dealt to splits in turn, bytes of keys and of values fetched into L2
    before the wait (fused).
    """

    splits: int
    block: int
    merge: int
    warps: int
    stages: int
    registers: int = 0
    cyclic: bool = False
    fetch: int = 0


def config(kv_heads: int, dim: int, processors: int, item: int = 2) -> Config:
    """Return the launch configuration for every context: one program per multiprocessor, blocks dealt in turn. Measured
    for entries of two bytes; four (`item`) halve the block and are untuned.
    """
    splits = max(1, processors // kv_heads)
    splits = 1 << (splits.bit_length() - 1)
    block = (256 if dim <= 128 else 128) // item
    return Config(splits, block, min(16, splits), 4, 3 if dim <= 128 else 2, cyclic=True)


@triton.jit
def rotation(inv_freq, position, scaling, lane, D: tl.constexpr):
    """Return scaled cosines and sines of a head's lanes at one position."""
    angle = position.to(tl.float32) * tl.load(inv_freq + lane % (D // 2), mask=lane < D, other=0.0)
    return tl.cos(angle) * scaling, tl.sin(angle) * scaling


@triton.jit
def rotated(base, norm, cosine, sine, eps, lane, D: tl.constexpr, NORMED: tl.constexpr):
    """Return a normed and rotated head: the D floats at `base` (a tensor of row pointers or one pointer), lanes in
    0..D.
    """
    half: tl.constexpr = D // 2
    live = lane < D
    other = tl.where(lane < half, lane + half, lane - half)
    value = tl.load(base + lane, mask=live, other=0.0)
    partner = tl.load(base + other, mask=live, other=0.0)
    if NORMED:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=len(value.shape) - 1, keep_dims=True) / D + eps)
        value = value * scale * tl.load(norm + lane, mask=live, other=0.0)
        partner = partner * scale * tl.load(norm + other, mask=live, other=0.0)
    return value * cosine + tl.where(lane < half, -partner, partner) * sine


@triton.jit
def fetch_to_l2(base, begin, end, BYTES: tl.constexpr):
    """Ask for the bytes from `begin` to `end` after pointer `base`, at most BYTES (a power of two), without waiting
    for them.
    """
    offset = begin + tl.arange(0, BYTES // 128).to(tl.int64) * 128
    address = base.to(tl.int64) + tl.where(offset < end, offset, begin)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def absorb(query, keys, values, valid, top, total, out):
    """Fold one block into the running softmax (base 2): keys, values (BLOCK, D), valid (BLOCK,); query carries the
    scale. Of float32 entries one tensor-core product would count ten bits, three count all; halves take one anyway.
    """
    logits = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
    logits = tl.where(valid[None, :], logits, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(logits - base[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None], input_precision="tf32x3")
    return higher, total, out


@triton.jit
def split_attention(
    source, keys, values, lengths, result, scale,
    inv_freq, position, q_norm, k_norm, eps, scaling, full_k, full_v, packed_k, packed_v, packed_lengths,
    masses, outs, arrivals, CAPACITY, FULL_CAPACITY, PACKED_CAPACITY,
    GROUP: tl.constexpr, GROUP_SPAN: tl.constexpr, D: tl.constexpr, D_SPAN: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, MERGE: tl.constexpr, MEMBERS: tl.constexpr, FUSED: tl.constexpr, PACKED: tl.constexpr,
    QNORM: tl.constexpr,
    KNORM: tl.constexpr, STAGES: tl.constexpr, CYCLIC: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """source: rotated queries (heads, D), or with FUSED the raw q|k|v vector. `lengths` counts entries before this
    step's own.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    kv_heads = tl.num_programs(0)
    length = tl.load(lengths + head)
    if FUSED:
        cached = length
    else:
        cached = length + 1
    if CYCLIC:
        begin = split * BLOCK
        end = cached
        used = tl.maximum(1, tl.minimum(SPLITS, tl.cdiv(cached, BLOCK)))
    else:
        per_split = tl.cdiv(tl.cdiv(cached, SPLITS), BLOCK) * BLOCK
        begin = split * per_split
        end = tl.minimum(begin + per_split, cached)
        used = tl.maximum(1, tl.cdiv(cached, tl.maximum(per_split, 1)))
    stride: tl.constexpr = BLOCK * SPLITS if CYCLIC else BLOCK

    row = tl.arange(0, GROUP_SPAN)
    lane = tl.arange(0, D_SPAN)
    entry = tl.arange(0, BLOCK)
    in_dim = (lane < D)[None, :]
    key_base = keys + head.to(tl.int64) * CAPACITY * D + lane[None, :]
    value_base = values + head.to(tl.int64) * CAPACITY * D + lane[None, :]
    at = (begin + entry).to(tl.int64)[:, None] * D
    if FUSED:
        # Entries of earlier steps do not depend on the predecessor: the first block is under way before the wait.
        early = ((begin + entry) < end)[:, None] & in_dim
        first_keys = tl.load(key_base + at, mask=early, other=0.0)
        first_values = tl.load(value_base + at, mask=early, other=0.0)
        where = tl.load(position)
        cosine, sine = rotation(inv_freq, where, scaling, lane, D)
        if OVERLAP and FETCH > 0:
            width: tl.constexpr = D * keys.dtype.element_ty.primitive_bitwidth // 8
            plane = head.to(tl.int64) * CAPACITY * width
            ask = plane + (begin + stride).to(tl.int64) * width
            until = plane + end.to(tl.int64) * width
            if begin + stride < end:
                fetch_to_l2(keys, ask, until, FETCH)
                fetch_to_l2(values, ask, until, FETCH)
    wait_for_producer(OVERLAP)

    heads_here = head * GROUP + tl.minimum(row, GROUP - 1)
    if FUSED:
        raw_query = source + heads_here[:, None] * D
        query = rotated(raw_query, q_norm, cosine[None, :], sine[None, :], eps, lane[None, :], D, QNORM)
    else:
        query = tl.load(source + heads_here[:, None] * D + lane[None, :], mask=in_dim, other=0.0)
    query = query * (scale * 1.4426950408889634)
    narrow = query.to(keys.dtype.element_ty)

    top = tl.full((GROUP_SPAN,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_SPAN,), dtype=tl.float32)
    out = tl.zeros((GROUP_SPAN, D_SPAN), dtype=tl.float32)
    if FUSED:
        if split == 0:
            q_heads = kv_heads * GROUP
            raw_key = source + (q_heads + head) * D
            raw_value = source + (q_heads + kv_heads + head) * D
            new_key = rotated(raw_key, k_norm, cosine, sine, eps, lane, D, KNORM).to(keys.dtype.element_ty)
            new_value = tl.load(raw_value + lane, mask=lane < D, other=0.0).to(keys.dtype.element_ty)
            slot = (head.to(tl.int64) * FULL_CAPACITY + where) * D + lane
            tl.store(full_k + slot, new_key, mask=lane < D)
            tl.store(full_v + slot, new_value, mask=lane < D)
            if PACKED:
                slot = (head.to(tl.int64) * PACKED_CAPACITY + tl.load(packed_lengths + head)) * D + lane
                tl.store(packed_k + slot, new_key, mask=lane < D)
                tl.store(packed_v + slot, new_value, mask=lane < D)
            top = tl.sum(narrow.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1)
            total = tl.full((GROUP_SPAN,), 1.0, dtype=tl.float32)
            out = tl.zeros((GROUP_SPAN, D_SPAN), dtype=tl.float32) + new_value.to(tl.float32)[None, :]
        if begin < end:
            top, total, out = absorb(narrow, first_keys, first_values, (begin + entry) < end, top, total, out)
        begin += stride
    for start in tl.range(begin, end, stride, num_stages=STAGES):
        valid = (start + entry) < end
        at = (start + entry).to(tl.int64)[:, None] * D
        live = valid[:, None] & in_dim
        block_keys = tl.load(key_base + at, mask=live, other=0.0)
        block_values = tl.load(value_base + at, mask=live, other=0.0)
        top, total, out = absorb(narrow, block_keys, block_values, valid, top, total, out)

    place = (head * SPLITS + split) * GROUP
    filled = tl.where(total > 0.0, total, 1.0)
    tl.store(masses + place + row, tl.where(total == 0.0, float("-inf"), top + tl.log2(filled)), mask=row < GROUP)
    spot = outs + (place + row)[:, None] * D + lane[None, :]
    tl.store(spot, out / filled[:, None], mask=(row < GROUP)[:, None] & in_dim)

    if arrives_last(arrivals + head, SPLITS):
        piece = tl.arange(0, MERGE)
        member = tl.arange(0, MEMBERS)
        best = tl.full((MEMBERS,), float("-inf"), dtype=tl.float32)
        weight = tl.zeros((MEMBERS,), dtype=tl.float32)
        merged = tl.zeros((MEMBERS, D_SPAN), dtype=tl.float32)
        for low in tl.range(0, used, MERGE):
            spots = ((head * SPLITS + low + piece) * GROUP)[:, None] + member[None, :]
            real = ((low + piece) < used)[:, None] & (member < GROUP)[None, :]
            places = outs + (spots * D)[:, :, None] + lane[None, None, :]
            local = tl.load(masses + spots, mask=real, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(places, mask=real[:, :, None] & (lane < D)[None, None, :], other=0.0, cache_modifier=".cg")
            higher = tl.maximum(best, tl.max(local, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            factor = tl.exp2(local - base[None, :])
            shrink = tl.exp2(best - base)
            weight = weight * shrink + tl.sum(factor, axis=0)
            merged = merged * shrink[:, None] + tl.sum(part * factor[:, :, None], axis=0)
            best = higher
        final = result + (head * GROUP + member)[:, None] * D + lane[None, :]
        tl.store(final, merged / weight[:, None], mask=(member < GROUP)[:, None] & in_dim)


def _bind(
    source: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    scale: float,
    inv_freq: torch.Tensor, position: torch.Tensor, norms: tuple[torch.Tensor | None, torch.Tensor | None], eps: float,
    scaling: float, full: Cache | None, packed: Packed | None, chosen: Config | None,
) -> Callable[[], object]:  # fmt: skip
    kv_heads, capacity, dim = keys.shape
    group = out.shape[0] // dim // kv_heads
    c = chosen or config(kv_heads, dim, multiprocessors(keys), keys.element_size())
    states = kv_heads * c.splits * group
    masses, outs = workspace("masses", keys, states), workspace("outs", keys, states * dim)
    fused = full is not None
    full_k, full_v = full or (keys, values)
    packed_k, packed_v, packed_lengths = packed or (keys, values, lengths)
    q_norm, k_norm = (inv_freq if norm is None else norm for norm in norms)
    constants = {
        "GROUP": group, "GROUP_SPAN": max(16, power_of_two(group)), "D": dim, "D_SPAN": max(16, power_of_two(dim)),
        "BLOCK": c.block, "SPLITS": c.splits, "MERGE": c.merge, "MEMBERS": power_of_two(group), "FUSED": fused,
        "PACKED": packed is not None, "QNORM": norms[0] is not None, "KNORM": norms[1] is not None,
        "STAGES": c.stages, "CYCLIC": c.cyclic,
        "FETCH": c.fetch, "OVERLAP": overlaps(keys),
    }  # fmt: skip
    arguments = (
        source, keys, values, lengths, out, scale, inv_freq, position, q_norm, k_norm, eps, scaling, full_k, full_v,
        packed_k,
        packed_v, packed_lengths, masses, outs, counters(keys), capacity, full_k.shape[1], packed_k.shape[1],
    )  # fmt: skip
    return launcher(split_attention, (kv_heads, c.splits), arguments, constants, c.warps, c.stages, c.registers)


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    chosen: Config | None = None,
) -> Callable[[], object]:
    """Bind attention of rotated queries (heads, d) over lengths[h] + 1 cached entries of each KV head; out (heads *
    d,).
    """
    return _bind(query, keys, values, lengths, out, scale, query, lengths, (None, None), 0.0, 1.0, None, None, chosen)


def bind_step(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    full: Cache,
    packed: Packed | None,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    scaling: float = 1.0,
    chosen: Config | None = None,
) -> Callable[[], object]:
    """Bind rope_append and attention as one launch.

    qkv ((heads + 2 kv_heads) d,) raw projections; the new entry goes to `position` of `full` and, when given, to its
    length in `packed`, which is then the cache that is read; lengths (kv_heads,) int32 of the cache that is read.
    """
    keys, values = full if packed is None else (packed[0], packed[1])
    return _bind(
        qkv, keys, values, lengths, out, scale, inv_freq, position, (q_norm, k_norm), eps, scaling, full, packed, chosen
    )
