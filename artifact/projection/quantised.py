"""Projections from 8- or 4-bit weights, all read or thinned out by thresholds (crossover, section 3.3: s_w / s_kv moves
the crossover).

A `Precision` holds the codes of a whole model and the numbers that they stand for; decoding with it is a branch like
any other, so that caches, attention and counting stay what they are. The embedding and the head keep their precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from artifact.engine.models import Layer, Matrix, Weights
from artifact.engine.step import Buffers, Op
from artifact.errors import UserError
from artifact.projection.branch import Counters, Routed
from artifact.projection.dense import DenseRows
from artifact.projection.thresholds import PROJECTIONS, ThresholdedRows, Thresholds
from kernels import Launch, quant_gemv, silu_product
from kernels.norm import Norm
from kernels.quantised import BITS, GROUP, Quantised, dequantise, quantise
from kernels.selection import Selection

SITES = {"qkv": (0, 3), "o": (3, 4), "gate_up": (4, 6), "down": (6, 7)}  # columns in the order of PROJECTIONS


@dataclass(frozen=True)
class Precision:
    """codes: per layer the quantised matrix of every site; weights: the same model in the numbers that the codes stand
    for, which prefill and references compute with.
    """

    bits: int
    codes: tuple[dict[str, Quantised], ...]
    weights: Weights

    @property
    def weight_bits(self) -> float:
        """Bits per projection weight, scales included: s_w of the byte account."""
        return 8.0 * self.dense_bytes / (self.weights.shape.layers * self.weights.shape.projection_params)

    @property
    def scale_bytes(self) -> float:
        """Bytes of all scales, which every step reads."""
        return 4.0 * sum(one.scales.numel() for layer in self.codes for one in layer.values())

    @property
    def dense_bytes(self) -> float:
        """Bytes of all codes and scales."""
        return float(sum(one.dense_bytes for layer in self.codes for one in layer.values()))

    def branch(self, thresholds: Thresholds | None = None) -> QuantisedProjection:
        """The projection branch of this precision, dense or thresholded."""
        return QuantisedProjection(self, thresholds)


def to_precision(weights: Weights, bits: int) -> Precision:
    """Quantise the projections of a model. Raises UserError for other bits or widths that 4 bits cannot group."""
    shape = weights.shape
    widths = [width for projection in shape.projections for width in (projection.inputs, projection.outputs)]
    if bits not in BITS:
        raise UserError(f"weights of {bits} bits are not supported; choose {' or '.join(map(str, BITS))}")
    if bits == 4 and (odd := [width for width in widths if width % GROUP]):
        raise UserError(f"{shape.name} has a projection {odd[0]} wide; 4 bits need multiples of {GROUP}, use 8")
    codes, layers = [], []
    for layer in weights.layers:
        sites = {site: quantise(getattr(layer, site).w, bits) for site in SITES}
        codes.append(sites)
        layers.append(_stood_for(layer, sites, weights.dtype))
    identity = f"{weights.identity}-int{bits}"
    return Precision(bits, tuple(codes), replace(weights, layers=tuple(layers), identity=identity))


def _stood_for(layer: Layer, sites: dict[str, Quantised], dtype: torch.dtype) -> Layer:
    def matrix(site: str) -> Matrix:
        w = dequantise(sites[site], torch.float32).to(dtype)
        own: Matrix = getattr(layer, site)
        return Matrix(w, own.bias)

    return replace(layer, qkv=matrix("qkv"), o=matrix("o"), gate_up=matrix("gate_up"), down=matrix("down"))


@dataclass(frozen=True)
class QuantisedProjection:
    """The branch: every product reads codes. `thresholds` None reads all of them."""

    precision: Precision
    thresholds: Thresholds | None = None

    def bind(self, weights: Weights, buffers: Buffers) -> QuantisedSteps:
        """Raises UserError for the weights of another model or precision."""
        if weights.identity != self.precision.weights.identity:
            raise UserError(f"codes of {self.precision.weights.identity} do not decode {weights.identity}")
        return QuantisedSteps(self, buffers)

    def rows(self, weights: Weights) -> DenseRows | ThresholdedRows:
        """One pass over given tokens, on the numbers that the codes stand for."""
        own = self.precision.weights
        return DenseRows(own) if self.thresholds is None else self.thresholds.rows(own)


class QuantisedSteps:
    """Launches on codes; counters as those of a thresholded branch, None where all is read."""

    counters: Counters | None
    routed: Routed | None = None

    def __init__(self, branch: QuantisedProjection, buffers: Buffers) -> None:
        self.precision, self.buffers = branch.precision, buffers
        self.weights = branch.precision.weights
        shape, device = self.weights.shape, self.weights.device
        self.both = torch.zeros(1, 2 * shape.intermediate, dtype=torch.float32, device=device)
        self.counters = None
        self._selections: list[dict[str, Selection]] = []
        if branch.thresholds is not None:
            values = branch.thresholds.values.to(device)
            kept = torch.zeros(shape.layers, len(PROJECTIONS), dtype=torch.int32, device=device)
            self.counters = (kept, torch.zeros_like(kept, dtype=torch.int64))
            self._selections = [self._layer_selections(values[i], kept[i]) for i in range(shape.layers)]

    def _layer_selections(self, values: torch.Tensor, kept: torch.Tensor) -> dict[str, Selection]:
        shape = self.weights.shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        segments = {
            "qkv": (0, q, q + kv, q + 2 * kv),
            "o": (0, shape.hidden),
            "gate_up": (0, shape.intermediate, 2 * shape.intermediate),
            "down": (0, shape.hidden),
        }
        return {
            site: Selection(values[first:end].contiguous(), segments[site], kept[first:end])
            for site, (first, end) in SITES.items()
        }

    def qkv(self, index: int, layer: Layer) -> list[Op]:
        norm = Norm(layer.attention_norm, self.weights.eps)
        return [Op("qkv", self._product("qkv", index, layer.qkv, self.buffers.residual, self.buffers.qkv, norm))]

    def o(self, index: int, layer: Layer) -> list[Op]:
        return [Op("o", self._product("o", index, layer.o, self.buffers.mixed, self.buffers.residual, None, True))]

    def mlp(self, index: int, layer: Layer) -> list[Op]:
        b, norm = self.buffers, Norm(layer.mlp_norm, self.weights.eps)
        product = self._product("gate_up", index, layer.gate_up, b.residual, self.both[0], norm)
        activation = silu_product.bind(self.both, b.act[None])

        def paired() -> None:
            product()
            activation()

        return [
            Op("gate_up", paired),
            Op("down", self._product("down", index, layer.down, b.act, b.residual, None, True)),
        ]

    def _product(
        self,
        site: str,
        index: int,
        matrix: Matrix,
        x: torch.Tensor,
        y: torch.Tensor,
        norm: Norm | None,
        add: bool = False,
    ) -> Launch:
        codes = self.precision.codes[index][site]
        if not self._selections:
            return quant_gemv.bind(x, codes, y, matrix.bias, norm, add)
        return quant_gemv.bind_sparse(x, codes, y, self._selections[index][site], matrix.bias, norm, add)

    def bytes_read(self, steps: int) -> float:
        """Codes that were read, and all scales."""
        if self.counters is None:
            return self.precision.dense_bytes
        widths = torch.tensor([p.outputs for p in self.weights.shape.projections], dtype=torch.float64)
        kept = float((self.counters[1].cpu().double() * widths).sum()) / steps
        return kept * self.precision.bits / 8 + self.precision.scale_bytes
