"""From chosen entries to a packed cache: shared by every method that evicts by index.

A method supplies, per layer, scores and which entries it must keep; here the exact budget is filled, ties broken by
position, and the entries gathered in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from artifact.engine.cache import KVCache, PackedCache
from artifact.errors import UserError
from kernels import gather
from kernels.memory import empty


def budget(tokens: int, keep: float) -> int:
    """Entries that a keep ratio r_kv retains of `tokens`: rounded half up, at least one."""
    if not 0.0 < keep <= 1.0:
        raise UserError(f"KV keep ratio {keep} is not in (0, 1]; give the share of entries to read, such as 0.3")
    return max(1, math.floor(keep * tokens + 0.5))


def choose(scores: torch.Tensor, forced: torch.Tensor, count: int) -> torch.Tensor:
    """Return (kv_heads, count) indices in ascending order: all forced entries, then the highest scores.

    scores (kv_heads, n); forced (n,) booleans, at most `count` of them. Equal scores go to the earlier entry, so that
    uniform scores never evict a forced entry and the result is the same on every device. NaN scores are an error:
    nothing sensible follows.
    """
    if bool(torch.isnan(scores).any()):
        raise ValueError("selection scores hold NaN; the attention of the observation rows is broken")
    ranked = scores.double().masked_fill(forced, float("inf"))
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=-1).values


def pack(full: KVCache, indices: Iterable[torch.Tensor], reserve: int) -> PackedCache:
    """Gather the chosen entries of every layer into a packed cache with room for `reserve` more per head.

    indices: one (kv_heads, kept) int64 tensor per layer. The full cache is read and left as it is.
    """
    chosen = list(indices)
    layers, kv_heads, _, dim = full.keys.shape
    device = str(full.keys.device)
    capacity = max(index.shape[1] for index in chosen) + reserve
    size = (layers, kv_heads, capacity, dim)
    keys, values = empty(size, full.keys.dtype, device), empty(size, full.values.dtype, device)
    lengths = torch.zeros(layers, kv_heads, dtype=torch.int32, device=device)
    for layer, index in enumerate(chosen):
        lengths[layer] = index.shape[1]
        gather.gather(
            full.keys[layer], full.values[layer], index.contiguous(), lengths[layer], keys[layer], values[layer]
        )
    return PackedCache(keys, values, lengths, full.tokens)
