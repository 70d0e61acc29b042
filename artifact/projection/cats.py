"""CATS: one threshold per layer, a percentile of the calibration activations |SiLU(gate)|, one share everywhere."""

from __future__ import annotations

import torch

from artifact.checks import in_range
from artifact.errors import UserError
from artifact.projection.gate_stats import LEVELS
from artifact.projection.masked import GateMask


def thresholds(quantiles: torch.Tensor, sparsity: float) -> GateMask:
    """Return limits at or below which a share `sparsity` of every layer's calibration activations lies.

    quantiles (L, LEVELS + 1) of |SiLU(gate)| at equal steps; between two of them the limit is interpolated.
    """
    in_range("sparsity", sparsity, 0, 1)
    if sparsity == 1.0:
        raise UserError("a sparsity of 1 drops every channel; give a share below 1, such as 0.5")
    low = int(sparsity * LEVELS)
    share = sparsity * LEVELS - low
    return GateMask(((1.0 - share) * quantiles[:, low] + share * quantiles[:, low + 1]).float())
