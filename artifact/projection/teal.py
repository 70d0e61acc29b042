"""Training-free activation sparsity by magnitude (TEAL; the projection branch of crossover, section 4.1).

Thresholds are quantiles of |x| at the four inputs of a layer: attention in (shared by q, k and v), o in, MLP in (gate
and up), down in. They are taken over calibration tokens of a dense prefill; no symmetry or zero mean is assumed, |x|
is measured as it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from artifact.engine.models import Weights
from artifact.engine.prefill import SITES, prefill
from artifact.errors import UserError
from artifact.projection.magnitudes import Magnitudes
from artifact.projection.thresholds import PROJECTIONS, Thresholds

_SITE_OF = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
LEVELS = 1000  # quantiles are stored at every 0.1% of |x|
SKIP = 4  # the first tokens are attention sinks with activations far outside the rest


@dataclass(frozen=True)
class Calibration:
    """Quantiles of |x|: quantiles (L, 4, LEVELS + 1) float32 in the order of SITES; tokens_hash names what they came
    from.

    Thresholds for any keep ratio follow by interpolation, so one pass serves every setting.
    """

    quantiles: torch.Tensor
    tokens_hash: str
    tokens: int

    def thresholds(self, keep: float) -> Thresholds:
        """Return thresholds that keep a share `keep` of the channels of every projection, in (0, 1].

        keep = 1 returns negative thresholds: every channel is read, those that are exactly zero included.
        """
        if not 0.0 < keep <= 1.0:
            raise UserError(
                f"projection keep ratio {keep} is not in (0, 1]; give the share of channels to read, such as 0.5"
            )
        layers = self.quantiles.shape[0]
        if keep == 1.0:
            return Thresholds(torch.full((layers, len(PROJECTIONS)), -1.0), 1.0, self.tokens_hash)
        at = (1.0 - keep) * LEVELS
        low = min(int(at), LEVELS - 1)
        share = at - low
        site = (1.0 - share) * self.quantiles[:, :, low] + share * self.quantiles[:, :, low + 1]
        columns = [SITES.index(_SITE_OF[projection]) for projection in PROJECTIONS]
        return Thresholds(site[:, columns].float().contiguous(), keep, self.tokens_hash)


def calibrate(weights: Weights, tokens: torch.Tensor, skip: int = SKIP) -> Calibration:
    """Measure the quantiles on (n,) calibration tokens of a dense prefill, without its first `skip` rows.

    Raises UserError for too few tokens.
    """
    shape = weights.shape
    if tokens.shape[0] <= skip:
        raise UserError(
            f"{tokens.shape[0]} calibration tokens are too few, the first {skip} do not count; give a longer text"
        )
    seen = [[Magnitudes() for _ in SITES] for _ in range(shape.layers)]
    started: set[tuple[int, str]] = set()

    def observe(layer: int, site: str, x: torch.Tensor) -> None:
        first = (layer, site) not in started
        started.add((layer, site))
        seen[layer][SITES.index(site)].add(x[skip:] if first else x)

    prefill(weights, tokens, observe=observe)
    shares = torch.linspace(0.0, 1.0, LEVELS + 1, dtype=torch.float64)
    table = torch.stack([torch.stack([site.quantile(shares) for site in layer]) for layer in seen])
    return Calibration(table, hash_tokens(tokens), int(tokens.shape[0]))


def hash_tokens(tokens: torch.Tensor) -> str:
    """Return the SHA-256 of (n,) token ids as little-endian int64, first 16 hex digits."""
    return hashlib.sha256(tokens.cpu().numpy().astype("<i8").tobytes()).hexdigest()[:16]


def require_disjoint(calibration: torch.Tensor, evaluation: torch.Tensor, run: int = 64) -> None:
    """Raise UserError when calibration and evaluation share a run of `run` consecutive tokens: then they overlap.

    Shorter runs occur by chance in text of one kind; 64 tokens in a row do not. A text shorter than that must not lie
    inside the other as a whole.
    """
    run = min(run, len(calibration), len(evaluation))
    if run == 0:
        return

    def windows(tokens: torch.Tensor) -> set[bytes]:
        raw = tokens.cpu().numpy().astype("<i4")
        return {raw[i : i + run].tobytes() for i in range(max(0, len(raw) - run + 1))}

    if windows(calibration) & windows(evaluation):
        raise UserError(
            f"calibration and evaluation text share {run} or more consecutive tokens; give texts that do not overlap"
        )
