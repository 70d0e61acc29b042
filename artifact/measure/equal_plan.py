"""How many sequences dense decoding and CateKV hold in one memory budget, and at which context. Pure arithmetic.

A mode holds the weights in the one layout that dense steps read, its caches with room for the run's steps, and scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from artifact.account import K_TOKENS
from artifact.engine.memory_plan import RUNTIME_BYTES, scratch_bytes
from artifact.shapes import Shape
from kernels.batched_gemv import MOST

A100_BYTES = 80_000_000_000  # the paper's card
SCRATCH_BYTES = 256 << 20  # activations, logits, counters and workspaces: 20 MB for sixteen sequences, and room
FEWEST = 2  # a batch
SHORTEST_TOKENS = 4096


@dataclass(frozen=True)
class Equal:
    """Sequences of each mode in `budget_bytes` at `context`; together: whether both batches fit the device at once."""

    context: int
    dense: int
    catekv: int
    budget_bytes: int
    together: bool
    note: str


def weight_bytes(shape: Shape, item: int) -> int:
    """Bytes of all weights in one layout."""
    tables = shape.vocab * shape.hidden * (1 if shape.tied_head else 2)
    return item * (shape.layers * shape.projection_params + tables)


def cache_bytes(shape: Shape, entries: int, room: int, item: int) -> int:
    """Bytes of `entries` of all heads together and of `room` more for every head."""
    return 2 * shape.head_dim * item * (entries + shape.layers * shape.kv_heads * room)


def batches(shape: Shape, context: int, kept: int, room: int, item: int, budget_bytes: int) -> tuple[int, int]:
    """The largest batches (dense, CateKV) of `context` tokens, of which CateKV keeps `kept` entries over all heads."""
    left = budget_bytes - weight_bytes(shape, item) - SCRATCH_BYTES
    full = shape.layers * shape.kv_heads * context
    dense, own = (max(0, left // cache_bytes(shape, entries, room, item)) for entries in (full, kept))
    return min(MOST, dense), min(MOST, own)


def small(shape: Shape, context: int, kept: int, room: int, item: int, dense: int) -> Equal:
    """Equal memory by definition: what `dense` dense caches take. For machines that are no A100."""
    one = cache_bytes(shape, shape.layers * shape.kv_heads * context, room, item)
    budget = weight_bytes(shape, item) + SCRATCH_BYTES + dense * one
    return Equal(context, dense, batches(shape, context, kept, room, item, budget)[1], budget, True, "")


def on_card(
    shape: Shape, longest: int, kept: Callable[[int], int], room: int, item: int, free_bytes: int | None
) -> Equal | str:
    """80 GB, or what the card has free, at the longest context at which a dense batch fits; else the reason.

    kept: entries of all heads that CateKV keeps of a context. free_bytes None: nobody says; the card is taken for one
    of 80 GB. Where both batches do not fit side by side they are timed one after the other, each beside the prefill
    that it was made from, which the budget then leaves room for.
    """
    context = longest
    while context >= SHORTEST_TOKENS:
        full = shape.layers * shape.kv_heads * context
        prefill = cache_bytes(shape, full, room, item)
        aside = RUNTIME_BYTES + scratch_bytes(shape, context, item)
        free = A100_BYTES if free_bytes is None else free_bytes
        dense, own = batches(shape, context, kept(context), room, item, A100_BYTES)
        both = weight_bytes(shape, item) + 2 * SCRATCH_BYTES + dense * prefill
        together = both + own * cache_bytes(shape, kept(context), room, item) + aside <= free
        budget = A100_BYTES if together else min(A100_BYTES, free - aside - prefill)
        dense, own = batches(shape, context, kept(context), room, item, budget)
        if dense == MOST:
            return f"dense decoding fills the kernels' {MOST} sequences at {context:,} tokens; take a larger model"
        if dense >= FEWEST and own > dense:
            notes = [] if budget == A100_BYTES else [f"{budget / 1e9:.1f} GB in place of the paper's 80"]
            notes += [] if context == longest else [f"{context / K_TOKENS:g}K tokens: no dense batch fits at more"]
            notes += [f"CateKV's batch ends at {MOST}, the kernels' limit"] if own == MOST else []
            return Equal(context, dense, own, budget, together, "; ".join(notes))
        context //= 2
    need = weight_bytes(shape, item) / 1e9
    return (
        f"no batch of {FEWEST} dense sequences of {SHORTEST_TOKENS} tokens fits beside {need:.1f} GB of weights; "
        "take a smaller model or a card with more free memory"
    )
