"""Thresholds of the seven projections, where they were calibrated, and the branch that reads by them.

A thresholded projection reads input channel i when not |x_i| <= t. `Thresholds` carries one t per layer and
projection, so that q, k and v (or gate and up) may differ although they are fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from artifact.engine.models import Layer, Matrix, Weights
from artifact.engine.step import Buffers, Op
from artifact.errors import UserError
from artifact.projection.branch import Counters, Routed
from kernels import gate_up, sparse_gemv
from kernels.norm import Norm
from kernels.selection import Selection, mask

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

    def bind(self, weights: Weights, buffers: Buffers) -> ThresholdedSteps:
        """Raises UserError for thresholds of another number of layers."""
        if self.values.shape[0] != weights.shape.layers:
            raise UserError(
                f"thresholds for {self.values.shape[0]} layers, the model has {weights.shape.layers}; calibrate it"
            )
        return ThresholdedSteps(weights, buffers, self.values.to(weights.device))

    def rows(self, weights: Weights) -> ThresholdedRows:
        return ThresholdedRows(weights, dict(enumerate(self.values)))


class ThresholdedSteps:
    """Launches that skip the channels of every projection below its threshold, on the input-major weights."""

    counters: Counters
    routed: Routed | None = None

    def __init__(self, weights: Weights, buffers: Buffers, values: torch.Tensor) -> None:
        self.weights, self.buffers = weights, buffers
        size = (weights.shape.layers, len(PROJECTIONS))
        kept = torch.zeros(size, dtype=torch.int32, device=weights.device)
        self.counters = (kept, torch.zeros(size, dtype=torch.int64, device=weights.device))
        self.selections = [self._selections(values[layer], kept[layer]) for layer in range(weights.shape.layers)]

    def _selections(self, values: torch.Tensor, kept: torch.Tensor) -> dict[str, Selection]:
        """The selection of every fused projection of one layer."""
        shape = self.weights.shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        fused = {
            "qkv": ((0, 3), (0, q, q + kv, q + 2 * kv)),
            "o": ((3, 4), (0, shape.hidden)),
            "gate_up": ((4, 6), (0, shape.intermediate, 2 * shape.intermediate)),
            "down": ((6, 7), (0, shape.hidden)),
        }
        return {
            site: Selection(values[first:end].contiguous(), segments, kept[first:end])
            for site, ((first, end), segments) in fused.items()
        }

    def qkv(self, index: int, layer: Layer) -> list[Op]:
        b, norm = self.buffers, Norm(layer.attention_norm, self.weights.eps)
        select = self.selections[index]["qkv"]
        return [Op("qkv", sparse_gemv.bind(b.residual, layer.qkv.w_in, b.qkv, select, layer.qkv.bias, norm))]

    def o(self, index: int, layer: Layer) -> list[Op]:
        return [self._added("o", index, layer.o, self.buffers.mixed)]

    def mlp(self, index: int, layer: Layer) -> list[Op]:
        b, norm = self.buffers, Norm(layer.mlp_norm, self.weights.eps)
        select = self.selections[index]["gate_up"]
        paired = Op("gate_up", gate_up.bind_sparse(b.residual, layer.gate_up.w_in, b.act, select, norm))
        return [paired, self._added("down", index, layer.down, b.act)]

    def _added(self, site: str, index: int, matrix: Matrix, x: torch.Tensor) -> Op:
        select, residual = self.selections[index][site], self.buffers.residual
        return Op(site, sparse_gemv.bind(x, matrix.w_in, residual, select, matrix.bias, None, True))

    def bytes_read(self, steps: int) -> float:
        widths = torch.tensor([p.outputs for p in self.weights.shape.projections], dtype=torch.float64)
        read = float((self.counters[1].cpu().double() * widths).sum())
        return read * self.weights.embedding.element_size() / steps


class ThresholdedRows:
    """Thresholded projections of many rows; values maps a layer to its thresholds (7,)."""

    def __init__(self, weights: Weights, values: Mapping[int, torch.Tensor]) -> None:
        shape = weights.shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv_widths, self.hidden, self.intermediate = (q, kv, kv), shape.hidden, shape.intermediate
        self.values = values
        self.read = self.dense = 0

    def qkv(self, index: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return self._project(x, layer.qkv, self.qkv_widths, index, 0)

    def o(self, index: int, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return self._project(x, layer.o, (self.hidden,), index, 3)

    def mlp(self, index: int, layer: Layer, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = self._project(x, layer.gate_up, (self.intermediate,) * 2, index, 4).chunk(2, dim=-1)
        return self._project(functional.silu(gate) * up, layer.down, (self.hidden,), index, 6)

    @property
    def r_p(self) -> float:
        return self.read / self.dense

    def _project(
        self, x: torch.Tensor, matrix: Matrix, widths: tuple[int, ...], index: int, first: int
    ) -> torch.Tensor:
        """Return (m, N): each column segment reads the channels above its own threshold."""
        bias, w = matrix.bias, matrix.w.float()
        thresholds = self.values[index][first : first + len(widths)].tolist()
        parts, start = [], 0
        while start < len(widths):
            # Segments with one threshold are one product: q, k and v mostly, gate and up always.
            stop = start + 1
            while stop < len(widths) and thresholds[stop] == thresholds[start]:
                stop += 1
            low, high = sum(widths[:start]), sum(widths[:stop])
            read = mask(x, thresholds[start])
            self.read += int(read.sum()) * (high - low)
            self.dense += x.numel() * (high - low)
            kept = torch.where(read, x, torch.zeros_like(x))
            parts.append(functional.linear(kept, w[low:high], None if bias is None else bias[low:high]))
            start = stop
        return torch.cat(parts, -1)
