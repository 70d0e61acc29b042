"""Token routing: which token ids may take the sparse path, from the damage it did them (sats, equations 11 to 14).

The score of a token id is the mean of max(0, l_sparse - l_base) over its occurrences in a routing corpus; the token is
routed to the sparse path where its score is below tau; tau is chosen on a held-out split. In a decode step the table is
one look-up by the current token.

Defined where the paper is silent: a token id that the corpus does not hold has the mean damage of the whole corpus;
`weight` occurrences of that mean are added to every id, which 0 leaves out. Equal scores, of ids never seen above all,
are told apart by the id, lower first (merged vocabularies number frequent pieces low), so that a threshold can pass
between them; of thresholds equally close to the target the smallest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from artifact.checks import in_range
from artifact.errors import UserError

TIE_NATS = 1e-9  # far below any difference between losses


@dataclass(frozen=True)
class Scores:
    """values (V,) float64, counts (V,) int64: occurrences in the corpus; prior: the score of an id without any."""

    values: torch.Tensor
    counts: torch.Tensor
    prior: float

    def table(self, tau: float) -> torch.Tensor:
        """Return (V,) booleans: ids routed to the sparse path (equation 13)."""
        return self.values < tau

    def threshold(self, tokens: torch.Tensor, share: float) -> float:
        """tau whose routed share of the held-out tokens (n,) is closest to `share` (equation 14)."""
        in_range("routed share", share, 0, 1)
        if tokens.shape[0] == 0:
            raise UserError("there are no held-out tokens to choose a routing threshold on; give a longer text")
        own = self.values[tokens]
        levels, counts = own.unique(sorted=True, return_counts=True)
        # tau at a level routes what lies below it; infinity routes everything.
        below = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).double() / tokens.shape[0]
        best = int((below - share).abs().argmin())
        return float(levels[best]) if best < len(levels) else float("inf")


def scores(vocab: int, tokens: torch.Tensor, base: torch.Tensor, sparse: torch.Tensor, weight: float = 0.0) -> Scores:
    """Score every id of a vocabulary from occurrences: token ids (n,), losses of both paths (n,) in nats.

    Raises UserError for an empty corpus or losses that are not finite.
    """
    if tokens.shape[0] == 0:
        raise UserError("the routing corpus is empty; give a longer text")
    damage = (sparse.double() - base.double()).clamp(min=0)
    if not bool(torch.isfinite(damage).all()):
        raise UserError("the routing corpus holds losses that are not finite; check the model and its thresholds")
    prior = float(damage.mean())
    counts = torch.bincount(tokens, minlength=vocab)
    sums = torch.zeros(vocab, dtype=torch.float64).index_add_(0, tokens, damage)
    total = counts.double() + weight
    values = torch.where(total > 0, (sums + weight * prior) / total.clamp(min=1e-300), prior)
    apart = TIE_NATS * torch.arange(vocab, dtype=torch.float64) / vocab
    return Scores(values + apart, counts, prior)


def random_scores(vocab: int, seed: int) -> Scores:
    """Scores that know nothing: the control that a table of the same routed share is held against."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(vocab, generator=generator, dtype=torch.float64)
    return Scores(values, torch.zeros(vocab, dtype=torch.int64), 0.5)
