"""Dense decoding: every projection is read in the layout that is fastest for reading all of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from artifact.engine.models import Layer, Matrix, Weights
from artifact.engine.step import Buffers, Op
from artifact.projection.branch import Counters, Routed
from kernels import gate_up, gemv
from kernels.norm import Norm


class DenseSteps:
    """Dense launches; a branch that thins out only some of the projections takes the others from here."""

    counters: Counters | None = None
    routed: Routed | None = None

    def __init__(self, weights: Weights, buffers: Buffers) -> None:
        self.weights, self.buffers = weights, buffers

    def qkv(self, index: int, layer: Layer) -> list[Op]:
        norm = Norm(layer.attention_norm, self.weights.eps)
        return [Op("qkv", gemv.bind(self.buffers.residual, layer.qkv.w, self.buffers.qkv, layer.qkv.bias, norm))]

    def o(self, index: int, layer: Layer) -> list[Op]:
        launch = gemv.bind(self.buffers.mixed, layer.o.w, self.buffers.residual, layer.o.bias, None, True)
        return [Op("o", launch)]

    def mlp(self, index: int, layer: Layer) -> list[Op]:
        b, down = self.buffers, layer.down
        return [
            Op("gate_up", gate_up.bind(b.residual, layer.gate_up.w, b.act, Norm(layer.mlp_norm, self.weights.eps))),
            Op("down", gemv.bind(b.act, down.w, b.residual, down.bias, None, True)),
        ]

    def bytes_read(self, steps: int) -> float:
        shape = self.weights.shape
        return float(shape.layers * shape.projection_params * self.weights.embedding.element_size())


class DenseRows:
    """Dense projections of many rows."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def qkv(self, index: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return linear(x, layer.qkv)

    def o(self, index: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return linear(x, layer.o)

    def mlp(self, index: int, layer: Layer, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
        return linear(functional.silu(gate) * up, layer.down)

    @property
    def r_p(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Dense:
    """The branch that reads every weight."""

    def bind(self, weights: Weights, buffers: Buffers) -> DenseSteps:
        return DenseSteps(weights, buffers)

    def rows(self, weights: Weights) -> DenseRows:
        return DenseRows(weights)


def linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return (m, N) float32 of rows x (m, K): float32 products of stored weights, as a step's kernels form them."""
    return functional.linear(x, matrix.w.float(), matrix.bias)
