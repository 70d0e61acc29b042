"""Page selection before attention (Quest): which pages of a ragged cache can hold keys that this query scores highly.

Per page p of `size` entries the cache keeps the smallest and largest value of every channel. An upper bound of any of
its logits, for a KV head the largest over its query heads, is

    u_p = max_g sum_c max(q_gc low_pc, q_gc high_pc)

A step first takes its new key into the bounds of the last page, then reads the bounds of all live pages, and names the
`budget` best, the last page always among them; equal bounds go to the earlier page. Bytes moved: 2 d s_kv per page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import Launch, backend, require_shape
from kernels.ragged import Pages


@dataclass(frozen=True)
class Bounds:
    """lows and highs (page rows, d) in the dtype of the keys; offsets (kv_heads,) int64: each head's first page row."""

    lows: torch.Tensor
    highs: torch.Tensor
    offsets: torch.Tensor


def reference(query: torch.Tensor, keys: torch.Tensor, budget: int, size: int) -> list[int]:
    """Return the chosen pages of one KV head in ascending order: query (group, d), keys (n, d) its own included."""
    scores = []
    for start in range(0, keys.shape[0], size):
        page = keys[start : start + size]
        low, high = page.amin(0), page.amax(0)
        scores.append(float(torch.maximum(query * low, query * high).sum(-1).max()))
    scores[-1] = float("inf")
    return sorted(sorted(range(len(scores)), key=lambda p: (-scores[p], p))[:budget])


def read_entries(pages: int, budget: int, live: int, size: int) -> int:
    """Entries that `budget` of `pages` pages hold, the last page partly filled, of `live` in all."""
    return (min(budget, pages) - 1) * size + live - (pages - 1) * size


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    bounds: Bounds,
    budgets: torch.Tensor,
    pages: Pages,
    attended: torch.Tensor,
) -> Launch:
    """Bind the choice of one layer, after the new key was appended to `keys` (rows, d) at offsets + lengths.

    budgets (kv_heads,) int32: pages per head, -1 for a head that reads everything; pages.chosen, pages.counts and
    attended (kv_heads,) int32 are written. attended counts entries read and one per page whose bounds were read, less
    the step's own entry: a page's two bounds are as many bytes as an entry's key and value.
    """
    kv_heads = lengths.shape[0]
    dim = query.shape[1]
    for name, tensor in (("offsets", offsets), ("budgets", budgets), ("page counts", pages.counts)):
        require_shape(name, tensor, (kv_heads,))
    require_shape("attended", attended, (kv_heads,))
    require_shape("chosen pages", pages.chosen, (kv_heads, pages.chosen.shape[-1]))
    require_shape("lows", bounds.lows, (bounds.lows.shape[0], dim))
    require_shape("highs", bounds.highs, tuple(bounds.lows.shape))
    return backend("pages", keys).bind(query, keys, offsets, lengths, bounds, budgets, pages, attended)
