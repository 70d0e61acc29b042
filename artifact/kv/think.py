"""ThinK: every key of a head keeps the same channels, those whose products with the observed queries are largest.

The structured baseline of SparK. Channel c of a KV head scores mean_rows q_c^2 times mean_tokens k_tc^2 (the squared
Frobenius norm of the channel's share of the attention logits); the T best are really packed, and attention shortens
the query to them. The most recent tokens and everything decoded stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact import checks
from artifact.engine.cache import PackedCache
from artifact.engine.pruned import PrunedCache, check_layers, query_strength, split_tail
from kernels.channels import Pruned
from kernels.memory import placed


@dataclass(frozen=True)
class ThinK:
    """keep: share of key channels stored; rows: queries of the observation window; recent: tokens that stay whole."""

    keep: float = 0.5
    rows: int = 32
    recent: int = 32

    def __post_init__(self) -> None:
        checks.in_range("share of key channels", self.keep, 0, 1)
        checks.count("rows", self.rows, 1)
        checks.count("recent tokens", self.recent, 1)

    def compress(self, source: PackedCache, queries: Sequence[torch.Tensor], reserve: int) -> PrunedCache:
        """Prune the entries of `source`; queries: per layer (heads, >= rows, d), rotated, of the last prompt tokens."""
        check_layers(queries, source.keys.shape[0])
        tokens, tail_keys, tail_values, lengths = split_tail(source, self.recent, reserve)
        layers = []
        for index, observed in enumerate(queries):
            keys = source.keys[index][:, :tokens]
            chosen = self.chosen(keys, observed)
            wide = chosen[:, None].expand(-1, tokens, -1)
            kept, values = placed(keys.gather(2, wide)), placed(source.values[index][:, :tokens])
            layers.append(Pruned(keys.shape[2], kept, None, chosen.int().contiguous(), None, None, 0.0, values))
        retained = int(source.lengths.max())
        return PrunedCache(tuple(layers), tail_keys, tail_values, lengths, source.prompt_tokens, retained)

    def chosen(self, keys: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
        """Return (kv_heads, T) channel numbers in ascending order; equal scores go to the earlier channel."""
        strength = query_strength(observed, self.rows, keys.shape[0], 2).to(keys.device)
        score = strength.double() * keys.double().square().mean(1)
        count = max(1, math.floor(self.keep * keys.shape[2] + 0.5))
        return torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values
