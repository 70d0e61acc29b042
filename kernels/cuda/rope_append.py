"""Rotation and append in Triton, for callers that do not use attention.bind_step: one program per query or KV head."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.cuda.attention import Cache, Packed, rotated, rotation
from kernels.cuda.common import launcher, overlaps, power_of_two, wait_for_producer
from kernels.rope_append import Rows


@triton.jit
def rotate_and_append(
    qkv, inv_freq, position, query, full_k, full_v, packed_k, packed_v, lengths, q_norm, k_norm, eps, scaling,
    HEADS, FULL_CAPACITY, PACKED_CAPACITY, D: tl.constexpr, SPAN: tl.constexpr, PACKED: tl.constexpr,
    QNORM: tl.constexpr,
    KNORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs below HEADS rotate a query head; the others rotate and store a KV head."""
    program = tl.program_id(0)
    kv_heads = tl.num_programs(0) - HEADS
    lane = tl.arange(0, SPAN)
    live = lane < D
    where = tl.load(position)
    cosine, sine = rotation(inv_freq, where, scaling, lane, D)
    wait_for_producer(OVERLAP)
    if program < HEADS:
        turned = rotated(qkv + program * D, q_norm, cosine, sine, eps, lane, D, QNORM)
        tl.store(query + program * D + lane, turned, mask=live)
    else:
        head = program - HEADS
        key = rotated(qkv + program * D, k_norm, cosine, sine, eps, lane, D, KNORM)
        value = tl.load(qkv + (program + kv_heads) * D + lane, mask=live, other=0.0)
        slot = (head.to(tl.int64) * FULL_CAPACITY + where) * D + lane
        tl.store(full_k + slot, key.to(full_k.dtype.element_ty), mask=live)
        tl.store(full_v + slot, value.to(full_v.dtype.element_ty), mask=live)
        if PACKED:
            slot = (head.to(tl.int64) * PACKED_CAPACITY + tl.load(lengths + head)) * D + lane
            tl.store(packed_k + slot, key.to(packed_k.dtype.element_ty), mask=live)
            tl.store(packed_v + slot, value.to(packed_v.dtype.element_ty), mask=live)


def bind(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    query: torch.Tensor,
    full: Cache,
    packed: Packed | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    scaling: float = 1.0,
) -> Callable[[], object]:
    """Bind rotation and append for one token; see kernels.rope_append.bind for shapes."""
    heads, dim = query.shape
    kv_heads = full[0].shape[0]
    packed_k, packed_v, lengths = packed or (*full, position)
    constants = {
        "D": dim, "SPAN": power_of_two(dim), "PACKED": packed is not None, "QNORM": q_norm is not None,
        "KNORM": k_norm is not None, "OVERLAP": overlaps(full[0]),
    }  # fmt: skip
    arguments = (
        qkv, inv_freq, position, query, *full, packed_k, packed_v, lengths, inv_freq if q_norm is None else q_norm,
        inv_freq if k_norm is None else k_norm, eps, scaling, heads, full[0].shape[1], packed_k.shape[1],
    )  # fmt: skip
    return launcher(rotate_and_append, (heads + kv_heads,), arguments, constants, 1)


@triton.jit
def rotate_to_rows(
    qkv, inv_freq, position, query, full_k, full_v, row_k, row_v, offsets, lengths, q_norm, k_norm, eps, HEADS,
    FULL_CAPACITY, D: tl.constexpr, SPAN: tl.constexpr, QNORM: tl.constexpr, KNORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `rotate_and_append`, to row offsets[h] + lengths[h] of flat storage; FULL_CAPACITY 0: no full cache."""
    program = tl.program_id(0)
    kv_heads = tl.num_programs(0) - HEADS
    lane = tl.arange(0, SPAN)
    live = lane < D
    where = tl.load(position)
    cosine, sine = rotation(inv_freq, where, 1.0, lane, D)
    wait_for_producer(OVERLAP)
    if program < HEADS:
        turned = rotated(qkv + program * D, q_norm, cosine, sine, eps, lane, D, QNORM)
        tl.store(query + program * D + lane, turned, mask=live)
    else:
        head = program - HEADS
        key = rotated(qkv + program * D, k_norm, cosine, sine, eps, lane, D, KNORM).to(row_k.dtype.element_ty)
        value = tl.load(qkv + (program + kv_heads) * D + lane, mask=live, other=0.0).to(row_v.dtype.element_ty)
        row = (tl.load(offsets + head) + tl.load(lengths + head)) * D + lane
        tl.store(row_k + row, key, mask=live)
        tl.store(row_v + row, value, mask=live)
        if FULL_CAPACITY > 0:
            slot = (head.to(tl.int64) * FULL_CAPACITY + where) * D + lane
            tl.store(full_k + slot, key, mask=live)
            tl.store(full_v + slot, value, mask=live)


def bind_rows(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    query: torch.Tensor,
    full: Cache,
    rows: Rows,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> Callable[[], object]:
    """Bind rotation and append to rows; see kernels.rope_append.bind_rows for shapes."""
    heads, dim = query.shape
    kv_heads, capacity, _ = full[0].shape
    constants = {
        "D": dim, "SPAN": power_of_two(dim), "QNORM": q_norm is not None, "KNORM": k_norm is not None,
        "OVERLAP": overlaps(rows[0]),
    }  # fmt: skip
    full_k, full_v = full if capacity else rows[:2]
    arguments = (
        qkv, inv_freq, position, query, full_k, full_v, *rows, inv_freq if q_norm is None else q_norm,
        inv_freq if k_norm is None else k_norm, eps, heads, capacity,
    )  # fmt: skip
    return launcher(rotate_to_rows, (heads + kv_heads,), arguments, constants, 1)
