"""Sink-plus-recent window (attention sinks; crossover, section 4.1): as many entries as the selection, chosen by
position alone.

The paper reads the window in place. Here the retained entries are packed like those of every method, so that one
attention kernel and one byte count serve all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from artifact import checks
from artifact.engine.cache import KVCache, PackedCache
from artifact.kv.retain import budget, pack


@dataclass(frozen=True)
class Window:
    """Parameters of the window: `sinks` first entries, the rest of the budget the most recent ones."""

    sinks: int = 4

    def __post_init__(self) -> None:
        checks.count("sinks", self.sinks, 0)

    def select(self, full: KVCache, keep: float, reserve: int) -> PackedCache:
        """Pack sinks and recent entries of the prompt; keep is r_kv in (0, 1]."""
        index = self.index(full.tokens, keep).to(full.keys.device)
        layers, kv_heads = full.lengths.shape
        return pack(full, [index.expand(kv_heads, -1)] * layers, reserve)

    def index(self, tokens: int, keep: float) -> torch.Tensor:
        """Return the retained positions (kept,) in ascending order: the window's own region."""
        count = budget(tokens, keep)
        recent = max(count - self.sinks, min(count, 1))
        sinks = min(count - recent, self.sinks)
        return torch.cat((torch.arange(sinks), torch.arange(tokens - recent, tokens)))
