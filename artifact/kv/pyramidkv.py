"""PyramidKV: attention-scored eviction whose budget falls linearly from the first layer to the last.

The scores are those of SnapKV; only the layers' shares differ. With a mean budget b and beta = 20 the last layer keeps
b / 20 and the first 2 b - b / 20; the total is exactly that of a uniform budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact import checks
from artifact.engine.cache import KVCache
from artifact.engine.ragged import RaggedCache, pack_ragged
from artifact.errors import UserError
from artifact.kv.retain import budget, choose
from kernels import score


@dataclass(frozen=True)
class PyramidKV:
    """beta: mean budget over the last layer's; rows, sinks, pool, width, aggregate: as for SnapKV, at its baseline's
    observation window of 32 rows.
    """

    beta: float = 20.0
    rows: int = 32
    sinks: int = 4
    pool: str = "max"
    width: int = 21
    aggregate: str = "mean"

    def __post_init__(self) -> None:
        if checks.finite("beta", self.beta) < 1:
            raise UserError(f"beta is {self.beta}; the last layer keeps the mean budget over beta, give at least 1")
        checks.count("rows", self.rows, 1)
        checks.count("sinks", self.sinks, 0)

    def select(
        self, full: KVCache, queries: Sequence[torch.Tensor], keep: float, scale: float, reserve: int
    ) -> RaggedCache:
        """Pack the prompt; keep is the mean share over layers, queries as for SnapKV."""
        tokens = full.tokens
        if len(queries) != full.keys.shape[0]:
            raise UserError(f"there are queries of {len(queries)} layers for a cache of {full.keys.shape[0]}")
        chosen = []
        for layer, count in enumerate(self.counts(tokens, keep, len(queries))):
            rows = min(self.rows, tokens, count)
            forced = torch.zeros(tokens, dtype=torch.bool, device=full.keys.device)
            forced[tokens - rows :] = True
            forced[: min(self.sinks, count - rows)] = True
            observed = queries[layer][:, -min(self.rows, tokens) :]
            keys = full.keys[layer][:, :tokens].contiguous()
            scores = score.snapkv(observed, keys, scale, self.pool, self.width, self.aggregate)
            chosen.append(list(choose(scores, forced, count)))
        return pack_ragged(full, chosen, reserve)

    def counts(self, tokens: int, keep: float, layers: int) -> list[int]:
        """Entries per head of every layer: falling, between 1 and `tokens`, their sum exactly layers x budget.

        What a layer cannot take because the prompt ends goes to the next ones in order.
        """
        mean = budget(tokens, keep)
        last = mean / self.beta
        first = 2 * mean - last
        step = (first - last) / max(1, layers - 1)
        counts = [min(tokens, max(1, round(first - step * i))) if layers > 1 else mean for i in range(layers)]
        spare, at = layers * mean - sum(counts), 0
        while spare:
            moved = max(1 - counts[at], min(tokens - counts[at], spare))
            counts[at] += moved
            spare -= moved
            at = (at + 1) % layers
        return counts
