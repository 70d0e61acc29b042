"""Embedding, greedy choice and the end of a step in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

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
    """tokens[position + 1] = the lowest index of the largest logit; each program takes one chunk, the last to arrive merges."""
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
def advance(addresses, sizes, kept, total, KEPT, SPAN: tl.constexpr, OVERLAP: tl.constexpr):
    """Program i adds one to the int32 values at addresses[i]; program 0 also adds kept to total."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # without releasing the next step early: it may read lengths before its own wait
    program = tl.program_id(0)
    lane = tl.arange(0, SPAN)
    counter = tl.load(addresses + program).to(tl.pointer_type(tl.int32)) + lane
    live = lane < tl.load(sizes + program)
    tl.store(counter, tl.load(counter, mask=live, other=0) + 1, mask=live)
    if program == 0:
        for start in range(0, KEPT, SPAN):
            at = start + lane
            now = tl.load(kept + at, mask=at < KEPT, other=0).to(tl.int64)
            tl.store(total + at, tl.load(total + at, mask=at < KEPT, other=0) + now, mask=at < KEPT)


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
    step_counters: list[torch.Tensor], kept: torch.Tensor | None = None, total: torch.Tensor | None = None
) -> Callable[[], object]:
    """Bind every int32 counter += 1 and total (int64) += kept (int32) in one launch. The launch keeps the counters alive."""
    device = step_counters[0].device
    addresses = torch.tensor([counter.data_ptr() for counter in step_counters], dtype=torch.int64, device=device)
    sizes = torch.tensor([counter.numel() for counter in step_counters], dtype=torch.int32, device=device)
    counted = 0 if kept is None or total is None else kept.numel()
    span = power_of_two(max(32, *(counter.numel() for counter in step_counters)))
    constants = {"SPAN": span, "OVERLAP": overlaps(addresses)}
    arguments = (addresses, sizes, sizes if kept is None else kept, addresses if total is None else total, counted)
    run = launcher(advance, (len(step_counters),), arguments, constants, 1)
    alive = tuple(step_counters)

    def launch() -> object:
        return run() if alive else None

    return launch
