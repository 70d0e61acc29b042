"""Gather of retained cache entries in Triton: a program copies a few rows of one KV head."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.common import power_of_two

ROWS = 16


@triton.jit
def copy_rows(keys, values, index, counts, packed_keys, packed_values, CAPACITY, PACKED_CAPACITY, MOST, D: tl.constexpr,
              D_SPAN: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """packed[h, j] = cache[h, index[h, j]] for j < counts[h]."""
    head = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, D_SPAN)
    taken = slot < tl.load(counts + head)
    source = tl.load(index + head * MOST + slot, mask=taken, other=0)
    live = taken[:, None] & (lane < D)[None, :]
    read = (head * CAPACITY + source)[:, None] * D + lane[None, :]
    write = (head * PACKED_CAPACITY + slot)[:, None] * D + lane[None, :]
    tl.store(packed_keys + write, tl.load(keys + read, mask=live), mask=live)
    tl.store(packed_values + write, tl.load(values + read, mask=live), mask=live)


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
) -> None:
    """Copy the indexed entries; arguments are checked by `kernels.gather.gather`."""
    kv_heads, capacity, dim = keys.shape
    most = index.shape[1]
    copy_rows[(kv_heads, triton.cdiv(most, ROWS))](
        keys, values, index, counts, packed_keys, packed_values, capacity, packed_keys.shape[1], most, D=dim,
        D_SPAN=power_of_two(dim), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
