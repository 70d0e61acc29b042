"""Which contexts fit a GPU: bytes of weights, caches and scratch that a measuring process holds at once.

Weights are held twice, output-major and input-major. Synthetic members of a group share one full cache; members on
real text that read it copy it, KV members share one that they only append to and hold packed copies beside it. Pure
arithmetic: measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from artifact.account import K_TOKENS
from artifact.shapes import Shape

Row = dict[str, Any]
ROOM_TOKENS = 128  # steps of a run, and what a member appends before them
RUNTIME_BYTES = 3 << 30  # CUDA context, library workspaces, graphs, the buffer of the bandwidth measurement
SHORTEST_TOKENS = 4096  # below it a sweep says nothing about contexts

Groups = Callable[[int], list[list[Row]]]


@dataclass(frozen=True)
class Fit:
    """The longest context that fits, and one sentence when it is shorter than what was asked for."""

    tokens: int
    note: str


def weight_bytes(shape: Shape, item: int) -> int:
    """Bytes of all weights: projections in both layouts, embedding and head once each (or once when tied)."""
    return item * (2 * shape.layers * shape.projection_params + _tables(shape))


def _tables(shape: Shape) -> int:
    return shape.vocab * shape.hidden * (1 if shape.tied_head else 2)


def masked_bytes(shape: Shape, item: int, tokens: int, arms: int, adapters: int) -> int:
    """Bytes that a process holds which times gate-mask arms at `tokens`: weights with down in both layouts, a copy of
    gate and of down per fused adapter, a cache of the prompt and one per arm.
    """
    third = shape.layers * shape.hidden * shape.intermediate
    weights = item * (shape.layers * shape.projection_params + _tables(shape) + (1 + 2 * adapters) * third)
    caches = (1 + arms) * tokens * item * shape.layers * shape.kv_values_per_token
    return weights + caches + scratch_bytes(shape, tokens, item) + prefill_bytes(shape, tokens, item) + RUNTIME_BYTES


def scratch_bytes(shape: Shape, context: int, item: int) -> int:
    """Bytes that come and go: the gate's float32 copies of one matrix and one head's cache, a selection's keys."""
    matrix = 4 * max(shape.vocab, shape.intermediate) * shape.hidden
    return matrix + context * shape.head_dim * (8 + shape.kv_heads * item)


def prefill_bytes(shape: Shape, context: int, item: int) -> int:
    """Bytes of a dense prefill beside its cache: hidden state, queries and attended values of one layer."""
    return context * (4 * shape.hidden + 2 * item * shape.heads * shape.head_dim)


def group_bytes(shape: Shape, group: Iterable[Row], longest: int, item: int, synthetic: bool) -> int:
    """Bytes of the caches that the members of one group hold together, prefill included."""
    token = item * shape.layers * shape.kv_values_per_token
    total = (longest + ROOM_TOKENS) * token
    unread = masked = 0
    for one in group:
        context = int(one["context"])
        if one["r_kv"] < 1:
            total += (int(one["r_kv"] * context) + ROOM_TOKENS) * token
            unread = max(unread, (context + ROOM_TOKENS) * token)
        elif not synthetic:
            total += (context + ROOM_TOKENS) * token
        if one["path"] == "masked":  # keys and values repeated for every query head, one layer at a time
            masked = max(masked, 2 * item * shape.heads * shape.head_dim * longest)
    return total + masked + (0 if synthetic else unread)


def batch_bytes(shape: Shape, batch: int, group: Iterable[Row], prefilled: int, item: int, synthetic: bool) -> int:
    """Bytes that the batches of one group hold at their peak: one full cache per sequence, the first that of the
    prefill where it leaves room for further steps, a packed copy per sequence of every selecting member, and the
    copies of full caches that the shortest members are checked on.
    """
    token = item * shape.layers * shape.kv_values_per_token
    contexts = [int(one["context"]) for one in group]
    lanes = prefilled + (batch - synthetic) * (max(contexts) + ROOM_TOKENS)
    packed = sum(int(one["r_kv"] * one["context"]) + ROOM_TOKENS for one in group if one["r_kv"] < 1)
    caches = (lanes + batch * (packed + min(contexts) + ROOM_TOKENS)) * token
    scratch = scratch_bytes(shape, prefilled, item) + (0 if synthetic else prefill_bytes(shape, prefilled, item))
    return weight_bytes(shape, item) + caches + scratch + RUNTIME_BYTES


def needed_bytes(shape: Shape, groups: Iterable[list[Row]], longest: int, item: int, synthetic: bool) -> int:
    """Bytes that a process measuring these groups holds at its peak."""
    caches = max(group_bytes(shape, group, longest, item, synthetic) for group in groups)
    scratch = scratch_bytes(shape, longest, item) + (0 if synthetic else prefill_bytes(shape, longest, item))
    return weight_bytes(shape, item) + caches + scratch + RUNTIME_BYTES


def fit(shape: Shape, groups: Groups, longest: int, item: int, synthetic: bool, free_bytes: int | None) -> Fit | str:
    """Halve `longest` until what `groups(longest)` needs is free. Returns the reason when nothing fits.

    free_bytes None: the device does not say or is a CPU; nothing is cut.
    """
    if free_bytes is None:
        return Fit(longest, "")
    tokens = longest
    while needed_bytes(shape, groups(tokens), tokens, item, synthetic) > free_bytes:
        shorter = 1 << ((tokens - 1).bit_length() - 1)  # the next power of two below
        if shorter < SHORTEST_TOKENS:
            need = needed_bytes(shape, groups(tokens), tokens, item, synthetic)
            return (
                f"{shape.name} needs {need / 1e9:.1f} GB at {tokens / K_TOKENS:g}K tokens (weights in two layouts, "
                f"caches, scratch), the GPU has {free_bytes / 1e9:.1f} GB free; choose a smaller --model"
            )
        tokens = shorter
    if tokens == longest:
        return Fit(longest, "")
    need = needed_bytes(shape, groups(longest), longest, item, synthetic)
    return Fit(
        tokens,
        f"contexts cut from {longest / K_TOKENS:g}K to {tokens / K_TOKENS:g}K tokens: {longest / K_TOKENS:g}K needs "
        f"{need / 1e9:.1f} GB, the GPU has {free_bytes / 1e9:.1f} GB free",
    )
