"""Page selection on CUDA: bounds and scores in one Triton launch, then a stable sort of torch, all of fixed shape, so
that a step can be captured.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.cuda.common import launcher, overlaps, power_of_two, wait_for_producer
from kernels.pages import Bounds
from kernels.ragged import Pages

PAGES_AT_ONCE = 32


@triton.jit
def page_bounds(
    query, keys, offsets, lengths, lows, highs, page_offsets, scores, MOST, SIZE: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_SPAN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """scores[h, p] = upper bound of page p, inf for the last live one, -inf after it; its bounds take the new key."""
    head = tl.program_id(0)
    wait_for_producer(OVERLAP)
    length = tl.load(lengths + head)
    last = length // SIZE
    lane = tl.arange(0, D_SPAN)
    live = lane < D
    base = tl.load(page_offsets + head)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = (base + page)[:, None] * D + lane[None, :]
    known = (page < last)[:, None] & live[None, :]
    low = tl.load(lows + at, mask=known, other=0.0).to(tl.float32)
    high = tl.load(highs + at, mask=known, other=0.0).to(tl.float32)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for g in range(GROUP):
        q = tl.load(query + (head * GROUP + g) * D + lane, mask=live, other=0.0)[None, :]
        best = tl.maximum(best, tl.sum(tl.maximum(q * low, q * high), axis=1))
    best = tl.where(page == last, float("inf"), tl.where(page < last, best, float("-inf")))
    tl.store(scores + head.to(tl.int64) * MOST + page, best, mask=page < MOST)
    if tl.program_id(1) == 0:
        key = tl.load(keys + (tl.load(offsets + head) + length) * D + lane, mask=live, other=0.0)
        spot = (base + last) * D + lane
        fresh = length % SIZE == 0
        lowest = tl.load(lows + spot, mask=live & (length % SIZE != 0), other=0.0)
        highest = tl.load(highs + spot, mask=live & (length % SIZE != 0), other=0.0)
        tl.store(lows + spot, tl.where(fresh, key, tl.minimum(lowest, key)), mask=live)
        tl.store(highs + spot, tl.where(fresh, key, tl.maximum(highest, key)), mask=live)


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    bounds: Bounds,
    budgets: torch.Tensor,
    pages: Pages,
    attended: torch.Tensor,
) -> Callable[[], object]:
    """Bind the choice of pages; shapes are checked by `kernels.pages.bind`."""
    heads, dim = query.shape
    kv_heads, most = pages.chosen.shape
    size = pages.size
    scores = torch.empty(kv_heads, most, dtype=torch.float32, device=keys.device)
    place = torch.arange(most, device=keys.device)
    constants = {
        "SIZE": size, "GROUP": heads // kv_heads, "D": dim, "D_SPAN": power_of_two(dim), "BLOCK": PAGES_AT_ONCE,
        "OVERLAP": overlaps(keys),
    }  # fmt: skip
    arguments = (query, keys, offsets, lengths, bounds.lows, bounds.highs, bounds.offsets, scores, most)
    score = launcher(page_bounds, (kv_heads, triton.cdiv(most, PAGES_AT_ONCE)), arguments, constants, 4)

    def choose() -> None:
        score()
        live = torch.div(lengths, size, rounding_mode="floor") + 1
        taken = torch.minimum(budgets, live)
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        ranked = torch.where(place < taken[:, None], order, most)
        pages.chosen.copy_(torch.sort(ranked, dim=1).values)
        pages.counts.copy_(torch.where(budgets < 0, -1, taken))
        read = (taken - 1) * size + lengths - (live - 1) * size + live
        attended.copy_(torch.where(budgets < 0, lengths, read))

    return choose
