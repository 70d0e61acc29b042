"""What a projection branch is: the weights that a step reads, as launches of a decoder and as one pass over many rows.

A branch is an object. `bind` makes the launches of one decoder, with counters of what they read; `rows` makes the same
function of many given tokens in torch, which quality is scored with. Dense decoding is the branch that reads all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from artifact.engine.models import Layer, Weights
from artifact.engine.step import Buffers, Op

Counters = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Routed:
    """A choice per token: table (V,) bool on the device, true where the token takes the branch; others take `base`."""

    table: torch.Tensor
    base: Steps


class Steps(Protocol):
    """The projections of one decoder."""

    @property
    def routed(self) -> Routed | None:
        """What tokens that do not take the branch run instead; None where all take it."""

    @property
    def counters(self) -> Counters | None:
        """What the last step read, int32, and the int64 sum over steps that the end of a step adds it to; None where
        every step reads the same.
        """

    def qkv(self, index: int, layer: Layer) -> list[Op]:
        """From the residual stream to `qkv`, attention norm included."""

    def o(self, index: int, layer: Layer) -> list[Op]:
        """From `mixed`, added to the residual stream."""

    def mlp(self, index: int, layer: Layer) -> list[Op]:
        """From the residual stream, added to it, MLP norm included."""

    def bytes_read(self, steps: int) -> float:
        """Weight bytes of the seven projections per step, mean over the `steps` that the counters sum up."""


class Rows(Protocol):
    """The projections of many rows in torch: x (m, channels) after its norm."""

    def qkv(self, index: int, layer: Layer, x: torch.Tensor) -> torch.Tensor: ...

    def o(self, index: int, layer: Layer, x: torch.Tensor) -> torch.Tensor: ...

    def mlp(self, index: int, layer: Layer, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """x (m, H) of the given tokens (m,); returns (m, H) to be added to the residual stream."""

    @property
    def r_p(self) -> float:
        """Share of the projection bytes that the rows so far read."""


class Projection(Protocol):
    """A projection branch."""

    def bind(self, weights: Weights, buffers: Buffers) -> Steps:
        """Make the launches of one decoder. Raises UserError when the branch does not fit the model."""

    def rows(self, weights: Weights) -> Rows:
        """Start a pass over given tokens."""
