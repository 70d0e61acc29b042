"""Thresholds of the seven projections and where they were calibrated.

A thresholded projection reads input channel i when not |x_i| <= t. `Thresholds` carries one t per layer and
projection, so that q, k and v (or gate and up) may differ although they are fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from artifact.errors import UserError

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class Thresholds:
    """values (L, 7) float32 in the order of PROJECTIONS; requested: the mean keep ratio asked for; source: hash of
    the tokens.

    `source` is compared with the evaluation tokens by `artifact.projection.teal.require_disjoint`.
    """

    values: torch.Tensor
    requested: float
    source: str

    def __post_init__(self) -> None:
        """Raise UserError for thresholds that fit no layer, or NaN: nothing is below NaN, so all would be read."""
        if self.values.dim() != 2 or self.values.shape[1] != len(PROJECTIONS):
            raise UserError(
                f"thresholds have shape {tuple(self.values.shape)}, one row of {len(PROJECTIONS)} per layer is needed"
            )
        if bool(torch.isnan(self.values).any()):
            raise UserError("thresholds hold NaN, below which no channel lies; calibrate them again")
