"""CateKV: heads whose attention stays on the same tokens keep a fixed budget of them, the others keep (nearly) all.

Section 3 of the paper. The last `rows` prompt tokens give each head an observation matrix of attention weights; the
first `sinks` and the last `recent` tokens are set aside. The matrix is binarised at the percentile that leaves
`critical` tokens per row on average; f_j counts the rows in which token j is critical. The coefficient of variation
std(f) / mean(f) is high where all rows name the same tokens (consistent) and low where they differ (adaptive). Which
heads are adaptive is decided once, by vote over a reference set, and then fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact import checks
from artifact.engine.cache import KVCache
from artifact.engine.ragged import RaggedCache, pack_ragged
from artifact.errors import UserError


@dataclass(frozen=True)
class CateKV:
    """Parameters; the defaults are the paper's at 128K (budget 2,048 = 64 + 1,728 + 256).

    upper: weights above this percentile of the matrix do not count either (1 counts all). eta: share of the entries
    that adaptive heads keep. The binarisation is between two percentiles in the paper and its lower one is not
    printed: here it follows from `critical`, as the sparse budget of the identification suggests.
    """

    rows: int = 64
    sinks: int = 64
    recent: int = 256
    critical: int = 1728
    upper: float = 1.0
    eta: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rows", "recent", "critical"):
            checks.count(name, getattr(self, name), 1)
        checks.count("sinks", self.sinks, 0)
        checks.in_range("upper percentile", self.upper, 0, 1)
        checks.in_range("eta", self.eta, 0, 1)

    @property
    def budget_tokens(self) -> int:
        """Entries that a consistent head keeps."""
        return self.sinks + self.critical + self.recent

    def frequency(self, queries: torch.Tensor, keys: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f and the attention mass (kv_heads, middle) of the tokens between sinks and recent ones.

        queries (heads, >= rows, d), rotated, of the last prompt tokens; keys (kv_heads, n, d). A KV head's matrix is
        the mean over its query heads. Raises UserError when nothing lies between sinks and recent tokens.
        """
        kv_heads, tokens, dim = keys.shape
        rows = min(self.rows, queries.shape[1], tokens)
        middle = tokens - self.sinks - self.recent
        if middle < 1:
            raise UserError(
                f"a prompt of {tokens} tokens has none between {self.sinks} sinks and {self.recent} recent tokens; "
                "give a longer one"
            )
        asked = queries[:, -rows:].float().reshape(kv_heads, -1, rows, dim)
        logits = torch.einsum("hgrd,hnd->hgrn", asked, keys.float()) * scale
        later = (
            torch.arange(tokens, device=keys.device) > torch.arange(tokens - rows, tokens, device=keys.device)[:, None]
        )
        weights = torch.softmax(logits.masked_fill(later, float("-inf")), -1).mean(1)
        observed = weights[..., self.sinks : tokens - self.recent]
        return self.binarised(observed).sum(1).float(), observed.sum(1)

    def binarised(self, observed: torch.Tensor) -> torch.Tensor:
        """Return the booleans of an observation matrix (kv_heads, rows, middle): critical in that row or not.

        The lower threshold is the weight of rank rows x critical; with fewer tokens than `critical` everything counts.
        """
        kv_heads, rows, middle = observed.shape
        flat = observed.reshape(kv_heads, -1)
        count = rows * min(self.critical, middle)
        lower = flat.kthvalue(flat.shape[1] - count + 1, dim=1).values if count < flat.shape[1] else flat.amin(1)
        critical = observed >= lower[:, None, None]
        if self.upper < 1:
            rank = max(1, round(self.upper * flat.shape[1]))
            critical &= observed <= flat.kthvalue(rank, dim=1).values[:, None, None]
        return critical

    def scores(self, cache: KVCache, queries: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """Return (L, kv_heads) coefficients of variation of a prefilled prompt."""
        found = []
        for layer, observed in enumerate(queries):
            f, _ = self.frequency(observed, cache.keys[layer][:, : cache.tokens], scale)
            found.append(variation(f))
        return torch.stack(found)

    def select(
        self, full: KVCache, queries: Sequence[torch.Tensor], adaptive: torch.Tensor, scale: float, reserve: int
    ) -> RaggedCache:
        """Pack the prompt: adaptive (L, kv_heads) booleans keep eta of it, the others `budget_tokens`.

        A prompt within the budget keeps everything. Raises UserError when the head types are another model's.
        """
        tokens = full.tokens
        if tuple(adaptive.shape) != tuple(full.lengths.shape):
            raise UserError(
                f"head types of {tuple(adaptive.shape)} heads for a cache of {tuple(full.lengths.shape)}; "
                "identify them on this model"
            )
        share = max(1, round(self.eta * tokens))
        everything = torch.arange(tokens)
        chosen: list[list[torch.Tensor]] = []
        for layer, types in enumerate(adaptive.tolist()):
            counts = [share if type_ else min(tokens, self.budget_tokens) for type_ in types]
            if min(counts) == tokens:
                chosen.append([everything] * len(types))
                continue
            f, mass = self.frequency(queries[layer], full.keys[layer][:, :tokens], scale)
            # Counts tie often; among equals the larger attention mass, always below one count, decides.
            ranked = f + mass / (1 + mass.amax(-1, keepdim=True))
            chosen.append([self._kept(tokens, count, ranked[head]) for head, count in enumerate(counts)])
        return pack_ragged(full, chosen, reserve)

    def _kept(self, tokens: int, count: int, ranked: torch.Tensor) -> torch.Tensor:
        """Positions of `count` entries in order: the latest ones first, then sinks, then the highest ranked."""
        if count >= tokens:
            return torch.arange(tokens)
        recent = min(self.recent, count)
        sinks = min(self.sinks, count - recent)
        order = torch.sort(ranked, descending=True, stable=True).indices[: count - recent - sinks].cpu()
        return torch.cat((torch.arange(sinks), self.sinks + order.sort().values, torch.arange(tokens - recent, tokens)))


def variation(frequency: torch.Tensor) -> torch.Tensor:
    """Coefficient of variation std / mean along the last axis; 0 where every count is 0."""
    f = frequency.double()
    mean = f.mean(-1)
    return torch.where(mean > 0, f.std(-1, correction=0) / mean.clamp(min=1e-300), torch.zeros_like(mean))


def head_count(heads: int, share: float) -> int:
    """Adaptive heads that a ratio r makes of `heads`: rounded half up."""
    checks.in_range("share of adaptive heads", share, 0, 1)
    return int(share * heads + 0.5)


def identify(variations: torch.Tensor, share: float) -> torch.Tensor:
    """Return (L, kv_heads) booleans, True for the adaptive heads of the whole model, exactly `head_count` of them.

    variations (samples, L, kv_heads). In every sample the heads with the lowest variation get a vote; the most votes
    win, ties go to the lower mean rank, then to the earlier head. Nothing but this one share decides.
    """
    samples, layers, kv_heads = variations.shape
    flat = variations.reshape(samples, -1).double()
    if bool(torch.isnan(flat).any()):
        raise ValueError("coefficients of variation hold NaN; the observation rows are broken")
    count = head_count(flat.shape[1], share)
    ranks = flat.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
    votes, mean_rank = (ranks < count).sum(0), ranks.double().mean(0)
    # Ranks are below the number of heads, so no sum of them outweighs a vote.
    order = torch.sort(votes * (flat.shape[1] + 1.0) - mean_rank, descending=True, stable=True).indices
    adaptive = torch.zeros(flat.shape[1], dtype=torch.bool)
    adaptive[order[:count].cpu()] = True
    return adaptive.view(layers, kv_heads)
