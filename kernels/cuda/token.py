"""Embedding, greedy choice and the end of a step in Triton."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.cuda.common import arrives_last, counters, launcher, overlaps, power_of_two, wait_for_producer, workspace

CHUNK = 2048


@triton.jit
def embed(tokens, position, table, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = table[tokens[position]]."""
    wait_for_producer(OVERLAP)
    token = tl.load(tokens + tl.load(position))
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    tl.store(out + column, tl.load(table + token * WIDTH + column, mask=live, other=0.0).to(tl.float32), mask=live)


@triton.jit
def choose(logits, tokens, position, best, place, arrivals, SIZE, CHUNK: tl.constexpr, PARTS_SPAN: tl.constexpr,
           OVERLAP: tl.constexpr):  # fmt: skip
    """tokens[position + 1] = the lowest index of the largest logit; each program takes one chunk, the last to arrive
    merges.
    """
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    wait_for_producer(OVERLAP)
    index = part * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + index, mask=index < SIZE, other=float("-inf"))
    top = tl.max(value, axis=0)
    tl.store(best + part, top)
    tl.store(place + part, tl.min(tl.where((value == top) & (index < SIZE), index, SIZE), axis=0))
    if arrives_last(arrivals, parts):
        order = tl.arange(0, PARTS_SPAN)
        tops = tl.load(best + order, mask=order < parts, other=float("-inf"), cache_modifier=".cg")
        places = tl.load(place + order, mask=order < parts, other=SIZE, cache_modifier=".cg")
        winner = tl.min(tl.where(tops == tl.max(tops, axis=0), places, SIZE), axis=0)
        tl.store(tokens + tl.load(position) + 1, tl.minimum(winner, SIZE - 1).to(tl.int64))


@triton.jit
def advance(
    addresses, sizes, attended, attended_total, kept, kept_total, ENTRIES, KEPT, COUNTERS: tl.constexpr,
    SPAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add what was read to the totals, then one to the int32 values at every address; by one program."""
    if OVERLAP:
        gdc_wait()  # without releasing the next step early: it may read lengths and position before its own wait
    lane = tl.arange(0, SPAN)
    for start in range(0, ENTRIES, SPAN):
        at = start + lane
        sum_so_far = tl.load(attended_total + at, mask=at < ENTRIES, other=0)
        read = tl.load(attended + at, mask=at < ENTRIES, other=0).to(tl.int64) + 1
        tl.store(attended_total + at, sum_so_far + read, mask=at < ENTRIES)
    for start in range(0, KEPT, SPAN):
        at = start + lane
        sum_so_far = tl.load(kept_total + at, mask=at < KEPT, other=0)
        read = tl.load(kept + at, mask=at < KEPT, other=0).to(tl.int64)
        tl.store(kept_total + at, sum_so_far + read, mask=at < KEPT)
    tl.debug_barrier()
    for index in tl.static_range(COUNTERS):
        counter = tl.load(addresses + index).to(tl.pointer_type(tl.int32))
        size = tl.load(sizes + index)
        for start in range(0, size, SPAN):
            at = start + lane
            tl.store(counter + at, tl.load(counter + at, mask=at < size, other=0) + 1, mask=at < size)


@triton.jit
def route(tokens, position, table, flag, CAPACITY, OVERLAP: tl.constexpr):
    """flag = table[tokens[position]], 0 past the end; the flag lies in pinned memory of the host."""
    if OVERLAP:
        gdc_wait()  # without releasing the next step early, like `advance`
    at = tl.load(position)
    inside = at < CAPACITY
    token = tl.load(tokens + at, mask=inside, other=0)
    tl.store(flag, tl.load(table + token, mask=inside, other=0).to(tl.int32))


def bind_embed(
    tokens: torch.Tensor, position: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> Callable[[], object]:
    """Bind out (H,) = table[tokens[position]]."""
    width = out.shape[0]
    constants = {"WIDTH": width, "BLOCK": 1024, "OVERLAP": overlaps(table)}
    return launcher(embed, (triton.cdiv(width, 1024),), (tokens, position, table, out), constants, 4)


def bind_argmax(logits: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor) -> Callable[[], object]:
    """Bind tokens[position + 1] = argmax(logits), the lowest index among equals."""
    size = logits.shape[0]
    parts = triton.cdiv(size, CHUNK)
    best, place = workspace("best", logits, parts), workspace("place", logits, parts).view(torch.int32)
    constants = {"CHUNK": CHUNK, "PARTS_SPAN": power_of_two(parts), "OVERLAP": overlaps(logits)}
    return launcher(choose, (parts,), (logits, tokens, position, best, place, counters(logits), size), constants, 4)


def bind_advance(
    position: torch.Tensor,
    lengths: list[torch.Tensor],
    entries: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor] | None,
) -> Callable[[], object]:
    """Bind the end of a step: sum what was read, then move every counter on. The launch keeps the counters alive."""
    moved = (position, *lengths)
    assert all(counter.dtype == torch.int32 and counter.is_contiguous() for counter in moved), "counters are int32 rows"
    device = position.device
    addresses = torch.tensor([counter.data_ptr() for counter in moved], dtype=torch.int64, device=device)
    sizes = torch.tensor([counter.numel() for counter in moved], dtype=torch.int32, device=device)
    channels, channels_total = kept if kept is not None else entries
    counted = 0 if kept is None else channels.numel()
    constants = {"COUNTERS": len(moved), "SPAN": 1024, "OVERLAP": overlaps(position)}
    arguments = (addresses, sizes, *entries, channels, channels_total, entries[0].numel(), counted)
    run = launcher(advance, (1,), arguments, constants, 4)

    def launch() -> object:
        return run() if moved else None

    return launch


def bind_route(
    tokens: torch.Tensor, position: torch.Tensor, table: torch.Tensor, flag: torch.Tensor
) -> Callable[[], object]:
    """Bind flag = table[tokens[position]], zero past the end."""
    constants = {"OVERLAP": overlaps(table)}
    arguments = (tokens, position, table.view(torch.uint8), flag, tokens.shape[0])
    return launcher(route, (1,), arguments, constants, 1)
