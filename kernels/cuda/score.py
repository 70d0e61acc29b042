"""SnapKV scores in Triton, twice over the keys: log-sums of every observed row first, then the probabilities summed
over rows.

No rows x n matrix is kept: a program holds one block of keys against all observed rows of one query head at a time.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.common import power_of_two

BLOCK = 64


@triton.jit
def block_logits(queries, keys, head, row, entry, scale, N, ROW_COUNT: tl.constexpr, GROUP: tl.constexpr,
D: tl.constexpr,
                 D_SPAN: tl.constexpr):  # fmt: skip
    """Return (rows, entries) base-2 logits of one query head, -inf after each row's own position."""
    lane = tl.arange(0, D_SPAN)
    spot = queries + (head * ROW_COUNT + row).to(tl.int64)[:, None] * D + lane[None, :]
    q = tl.load(spot, mask=(row < ROW_COUNT)[:, None] & (lane < D)[None, :], other=0.0) * (scale * 1.4426950408889634)
    place = keys + ((head // GROUP).to(tl.int64) * N + entry)[:, None] * D + lane[None, :]
    k = tl.load(place, mask=(entry < N)[:, None] & (lane < D)[None, :], other=0.0)
    logits = tl.dot(q.to(k.dtype), tl.trans(k))
    seen = entry[None, :] <= (N - ROW_COUNT + row)[:, None]
    return tl.where(seen & (entry < N)[None, :], logits, float("-inf"))


@triton.jit
def log_sums(queries, keys, tops, sums, scale, N, PER_PROGRAM, ROW_COUNT: tl.constexpr, ROWS: tl.constexpr,
GROUP: tl.constexpr,
             D: tl.constexpr, D_SPAN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Per (head, chunk of keys): running maximum and sum of exponentials of every observed row."""
    head = tl.program_id(0)
    row = tl.arange(0, ROWS)
    begin = tl.program_id(1) * PER_PROGRAM
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(begin, tl.minimum(begin + PER_PROGRAM, N), BLOCK):
        entry = start + tl.arange(0, BLOCK)
        logits = block_logits(queries, keys, head, row, entry, scale, N, ROW_COUNT, GROUP, D, D_SPAN)
        higher = tl.maximum(top, tl.max(logits, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(logits - base[:, None]), axis=1)
        top = higher
    at = (head * tl.num_programs(1) + tl.program_id(1)) * ROWS + row
    tl.store(tops + at, top)
    tl.store(sums + at, total)


@triton.jit
def summed(queries, keys, log_sum, out, scale, N, ROW_COUNT: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
           D: tl.constexpr, D_SPAN: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """Per (KV head, block of keys): sum over rows of the probabilities, mean or maximum over the group."""
    kv_head = tl.program_id(0)
    row = tl.arange(0, ROWS)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.zeros((BLOCK,), dtype=tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        logits = block_logits(queries, keys, head, row, entry, scale, N, ROW_COUNT, GROUP, D, D_SPAN)
        norm = tl.load(log_sum + head * ROWS + row, mask=row < ROW_COUNT, other=float("inf"))
        mass = tl.sum(tl.exp2(logits - norm[:, None]), axis=0)
        score = tl.maximum(score, mass) if LARGEST else score + mass / GROUP
    tl.store(out + kv_head.to(tl.int64) * N + entry, score, mask=entry < N)


def snapkv(queries: torch.Tensor, keys: torch.Tensor, scale: float, aggregate: str) -> torch.Tensor:
    """Return unpooled (kv_heads, n) scores; queries (heads, rows, d), keys (kv_heads, n, d); checked by
    kernels.score.snapkv.
    """
    heads, rows, dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    span = max(16, power_of_two(rows))
    chunks = min(32, triton.cdiv(tokens, BLOCK))
    per_program = triton.cdiv(triton.cdiv(tokens, chunks), BLOCK) * BLOCK
    shape = {
        "ROW_COUNT": rows, "ROWS": span, "GROUP": heads // kv_heads, "D": dim, "D_SPAN": max(16, power_of_two(dim)),
        "BLOCK": BLOCK,
    }  # fmt: skip
    tops = torch.empty(heads, chunks, span, dtype=torch.float32, device=keys.device)
    sums = torch.empty_like(tops)
    out = torch.empty(kv_heads, tokens, dtype=torch.float32, device=keys.device)
    log_sums[(heads, chunks)](queries, keys, tops, sums, scale, tokens, per_program, **shape, num_warps=4)
    top = tops.amax(1)
    log_sum = top + torch.log2((sums * torch.exp2(tops - top[:, None])).sum(1))
    summed[(kv_heads, triton.cdiv(tokens, BLOCK))](
        queries, keys, log_sum, out, scale, tokens, **shape, LARGEST=aggregate == "max", num_warps=4
    )
    return out
