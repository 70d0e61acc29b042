"""CATS: one threshold per layer, a percentile of the calibration activations |SiLU(gate)|, one share everywhere."""

from __future__ import annotations

import torch

from artifact.checks import in_range
from artifact.errors import UserError
from artifact.projection.gate_stats import GateStatistics
from artifact.projection.masked import GateMask


def thresholds(statistics: GateStatistics, sparsity: float) -> GateMask:
    """Return limits (L,) at or below which a share `sparsity` of every layer's calibration activations lies."""
    in_range("sparsity", sparsity, 0, 1)
    if sparsity == 1.0:
        raise UserError("a sparsity of 1 drops every channel; give a share below 1, such as 0.5")
    share = torch.tensor([sparsity])
    return GateMask(torch.cat([gate.quantile(share) for gate in statistics.gates]))
