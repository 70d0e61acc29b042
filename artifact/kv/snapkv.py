"""Attention-scored selection once after prefill (SnapKV; crossover, section 4.1): the KV branch of the paper.

Every choice that the paper leaves open is a named parameter. The defaults are the ones that keep retrieval at 30% on
a model whose digits are single tokens: max-pooling over 21 entries of the scores of the last 16 rows (narrower pools
lose codes of six tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact import checks
from artifact.engine.cache import KVCache, PackedCache
from artifact.errors import UserError
from artifact.kv.retain import budget, choose, pack
from kernels import score


@dataclass(frozen=True)
class SnapKV:
    """Parameters of the selection.

    rows: observation rows, the last prompt tokens, whose attention scores the cache and which are always kept.
    sinks: first entries that are always kept. pool, width: smoothing of the scores along the cache ("max", "avg" or
    "none"). aggregate: "mean" or "max" over the query heads of a KV head. Sinks and rows count inside the keep ratio;
    the budget is rounded half up; gathered entries stay in their original order.
    """

    rows: int = 16
    sinks: int = 4
    pool: str = "max"
    width: int = 21
    aggregate: str = "mean"

    def __post_init__(self) -> None:
        checks.count("rows", self.rows, 1)
        checks.count("sinks", self.sinks, 0)
        if checks.count("width", self.width, 1) % 2 == 0:
            raise UserError(f"width is {self.width}; a centred pool is odd, give {self.width + 1}")
        for name, value, known in (("pool", self.pool, score.POOLS), ("aggregate", self.aggregate, score.AGGREGATES)):
            if value not in known:
                raise UserError(f"{name} is {value!r}; give one of {', '.join(known)}")
        if self.pool == "none" and self.width != 1:
            raise UserError(f"width is {self.width} without pooling; give width 1 or a pool")

    def select(
        self, full: KVCache, queries: Sequence[torch.Tensor], keep: float, scale: float, reserve: int
    ) -> PackedCache:
        """Score the prompt in `full` and pack the retained entries.

        queries: per layer (heads, >= rows, d), rotated queries of the last prompt tokens. keep: r_kv in (0, 1].
        A budget under sinks + rows, or a prompt shorter than the observation rows, keeps the latest rows first, then
        sinks. Raises UserError when the queries are not those of every layer and observation row.
        """
        tokens = full.tokens
        count = budget(tokens, keep)
        rows = min(self.rows, tokens)
        forced = self.forced(tokens, count, full.keys.device)
        if len(queries) != full.keys.shape[0]:
            raise UserError(f"there are queries of {len(queries)} layers for a cache of {full.keys.shape[0]}")
        if queries[0].shape[1] < rows:
            raise UserError(
                f"{rows} observation rows, but the prefill kept {queries[0].shape[1]}; keep as many as the method asks"
            )
        indices = []
        for layer, observed in enumerate(queries):
            keys = full.keys[layer][:, :tokens].contiguous()
            scores = score.snapkv(observed[:, -rows:], keys, scale, self.pool, self.width, self.aggregate)
            indices.append(choose(scores, forced, count))
        return pack(full, indices, reserve)

    def forced(self, tokens: int, count: int, device: torch.device) -> torch.Tensor:
        """Return (tokens,) booleans of the entries kept whatever their score: the latest rows, then sinks, within
        `count`.
        """
        forced = torch.zeros(tokens, dtype=torch.bool, device=device)
        rows = min(self.rows, tokens, count)
        forced[tokens - rows :] = True
        forced[: min(self.sinks, tokens, max(0, count - rows))] = True
        return forced
