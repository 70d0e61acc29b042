"""Which sweeps of batched steps a GPU times: contexts around the crossings, as far as they fit."""

from __future__ import annotations

from collections.abc import Sequence

from artifact.account import K_TOKENS, Setting, n_star
from artifact.engine.memory_plan import batch_bytes
from artifact.engine.prepare import grid
from artifact.measure.batch_cells import members
from artifact.shapes import Shape

Sweep = tuple[int, tuple[int, int]]  # batch, (shortest, longest) context
Shares = tuple[int, tuple[float, float]]
CLOSEST = 2  # a sweep ends at least at this multiple of where it begins


def around(shape: Shape, shares: Sequence[Shares], r_p: float, r_kv: float) -> list[Sweep]:
    """Sweeps whose ends are these shares of the n* of one sequence, on the grid of contexts."""
    star = n_star(shape, Setting(r_p, r_kv))
    return [(batch, (grid(round(low * star)), grid(round(high * star)))) for batch, (low, high) in shares]


def fitting(
    shape: Shape,
    sweeps: Sequence[Sweep],
    longest: int,
    r_kv: float,
    item: int,
    synthetic: bool,
    free_bytes: int | None,
) -> tuple[list[Sweep], str]:
    """Cut sweeps to `longest`, then halve the longest context of each until it fits, or leave it out; with what was
    changed, in words.

    item: bytes of a weight and of a cache element. free_bytes None: nobody says; nothing is cut for memory.
    """
    kept: list[Sweep] = []
    notes = []
    for batch, (short, long) in sweeps:
        end = min(long, longest)
        while end >= CLOSEST * short and free_bytes is not None:
            prefilled = max([end, *(high for _, (_, high) in kept)])
            if needed_bytes(shape, (batch, (short, end)), prefilled, r_kv, item, synthetic) <= free_bytes:
                break
            end = grid(end // 2)
        if end < CLOSEST * short:
            asked = f"{short / K_TOKENS:.1f}K to {CLOSEST * short / K_TOKENS:.1f}K tokens"
            notes.append(f"batch of {batch} left out: the GPU has no room for {asked}")
            continue
        if end < long:
            notes.append(f"batch of {batch} cut from {long / K_TOKENS:.1f}K to {end / K_TOKENS:.1f}K tokens")
        kept.append((batch, (short, end)))
    return kept, "; ".join(notes)


def needed_bytes(shape: Shape, sweep: Sweep, prefilled: int, r_kv: float, item: int, synthetic: bool) -> int:
    """Bytes that a process holds while it times one sweep behind a prefill of `prefilled` tokens."""
    batch, (short, long) = sweep
    group = [{"context": n, "r_kv": own_kv} for n, _, own_kv, _ in members(short, long, 0.5, r_kv)]
    return batch_bytes(shape, batch, group, prefilled, item, synthetic)
