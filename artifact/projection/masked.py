"""The gate-masked MLP: the branch that CATS and SATS run, whatever their thresholds come from.

An intermediate channel takes part where |SiLU(gate)| is above the layer's limit. The gate is read densely, since it
decides; rows of up and of down are read where the mask is set. Attention projections stay dense. With a routing table
a token either takes that path or the dense launches, at no cost but the look-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from artifact.engine.models import Layer, Weights
from artifact.engine.step import Buffers, Op
from artifact.errors import UserError
from artifact.projection.branch import Counters, Routed
from artifact.projection.dense import DenseRows, DenseSteps, linear
from artifact.shapes import Shape
from kernels import gemv, masked_mlp, sparse_gemv
from kernels.masked_mlp import LowRank
from kernels.norm import Norm
from kernels.selection import Selection, mask


@dataclass(frozen=True)
class GateMask:
    """limits (L,) float32, one threshold on |SiLU(gate)| per layer; a negative one drops nothing.

    routed (V,) bool: token ids that take the masked path; None sends every token there.
    """

    limits: torch.Tensor
    routed: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.limits.dim() != 1 or bool(torch.isnan(self.limits).any()):
            raise UserError(
                f"gate limits of shape {tuple(self.limits.shape)} are not one number per layer; calibrate them again"
            )

    def require_fit(self, shape: Shape) -> None:
        """Raise UserError for limits or a routing table of another model."""
        if self.limits.shape[0] != shape.layers:
            raise UserError(
                f"gate limits for {self.limits.shape[0]} layers, the model has {shape.layers}; calibrate it"
            )
        if self.routed is not None and self.routed.shape != (shape.vocab,):
            raise UserError(
                f"a routing table of {tuple(self.routed.shape)} for a vocabulary of {shape.vocab}; make one for it"
            )

    def bind(self, weights: Weights, buffers: Buffers) -> MaskedSteps:
        self.require_fit(weights.shape)
        return MaskedSteps(weights, buffers, self)

    def rows(self, weights: Weights) -> MaskedRows:
        self.require_fit(weights.shape)
        return MaskedRows(weights, self)

    def takes_masked_path(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (m,) booleans: which of the given tokens (m,) are masked."""
        if self.routed is None:
            return torch.ones(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        return self.routed.to(tokens.device)[tokens]


class MaskedSteps(DenseSteps):
    """Three launches: gate densely, up where the mask is set, down where up left something.

    counters (L, 3): rows of up read, steps on the masked path, rows of down read.
    """

    counters: Counters
    rank = 0  # of the update that an adapter adds

    def __init__(self, weights: Weights, buffers: Buffers, branch: GateMask) -> None:
        super().__init__(weights, buffers)
        shape, device = weights.shape, weights.device
        self.gate = torch.zeros(shape.intermediate + 2 * self.rank, dtype=torch.float32, device=device)
        self.act = torch.zeros(shape.intermediate + self.rank, dtype=torch.float32, device=device)
        self.limits = branch.limits.to(device, torch.float32)
        total = torch.zeros(shape.layers, 3, dtype=torch.int64, device=device)
        self.counters = (_counts(shape, device, 0, 1, 0), total)
        if branch.routed is not None:
            base = DenseSteps(weights, buffers)
            base.counters = (_counts(shape, device, shape.intermediate, 0, shape.intermediate), total)
            self.routed = Routed(branch.routed.to(device), base)
        self._nothing = torch.zeros(1, dtype=torch.float32, device=device)

    def mlp(self, index: int, layer: Layer) -> list[Op]:
        b, down = self.buffers, layer.down
        norm, kept = Norm(layer.mlp_norm, self.weights.eps), self.counters[0][index]
        limit, up = self.limits[index : index + 1], layer.gate_up.w[self.weights.shape.intermediate :]
        low = self.low_rank(index)
        # What the mask dropped is exactly zero; a threshold of zero skips that and nothing else.
        select = Selection(self._nothing, (0, self.weights.shape.hidden), kept[2:])
        masked = masked_mlp.bind(self.gate, b.residual, up, self.act, limit, kept[:1], norm, low)
        return [
            Op("gate", gemv.bind(b.residual, self.gate_rows(index, layer), self.gate, norm=norm)),
            Op("up", masked),
            Op(
                "down",
                sparse_gemv.bind(self.act, self.down_rows(index, layer), b.residual, select, down.bias, None, True),
            ),
        ]

    def gate_rows(self, index: int, layer: Layer) -> torch.Tensor:
        """Weights (I + 2r, H) whose product with the normed residual stream `gate` receives."""
        return layer.gate_up.w[: self.weights.shape.intermediate]

    def down_rows(self, index: int, layer: Layer) -> torch.Tensor:
        """Weights (I + r, H), one row per entry of `act`."""
        return layer.down.w_in

    def low_rank(self, index: int) -> LowRank | None:
        """The update of an adapter, if any."""
        return None

    def bytes_read(self, steps: int) -> float:
        shape, item = self.weights.shape, self.weights.embedding.element_size()
        attention = shape.projection_params - shape.ffn_params
        gate = shape.hidden * shape.intermediate
        rows = float(self.counters[1][:, [0, 2]].sum()) / steps
        return float((shape.layers * (attention + gate) + rows * shape.hidden) * item)

    def masked_share(self, steps: int) -> float:
        """Share of the last `steps` steps that took the masked path."""
        return float(self.counters[1][0, 1]) / steps


def _counts(shape: Shape, device: torch.device, *per_layer: int) -> torch.Tensor:
    return torch.tensor(per_layer, dtype=torch.int32, device=device).repeat(shape.layers, 1)


class MaskedRows(DenseRows):
    """The gate-masked MLP of many rows. `kept` and `masked` count neurons and rows per layer, for realised sparsity."""

    def __init__(self, weights: Weights, branch: GateMask) -> None:
        super().__init__(weights)
        self.branch = branch
        layers = weights.shape.layers
        self.kept = [0] * layers
        self.rows = [0] * layers

    def mlp(self, index: int, layer: Layer, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
        return linear(self.activation(index, gate, up, self.branch.takes_masked_path(tokens)), layer.down)

    def activation(self, index: int, gate: torch.Tensor, up: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Return (m, I): silu(gate) up where the mask is set, and everywhere in rows that are not masked (m,)."""
        silu = functional.silu(gate)
        keep = mask(silu, self.branch.limits[index].to(silu.device)) | ~masked[:, None]
        self.kept[index] += int(keep.sum())
        self.rows[index] += int(keep.shape[0])
        return torch.where(keep, silu * up, torch.zeros_like(up))

    @property
    def sparsity(self) -> float:
        """Mean over layers of the share of intermediate channels dropped, unmasked rows included (sats, equation 9)."""
        return sum(self.layer_sparsity()) / len(self.rows)

    def layer_sparsity(self) -> list[float]:
        """The share dropped in every layer."""
        width = self.weights.shape.intermediate
        return [1 - kept / (rows * width) for kept, rows in zip(self.kept, self.rows, strict=True)]

    @property
    def r_p(self) -> float:
        shape = self.weights.shape
        return 1 - self.sparsity * 2 * shape.hidden * shape.intermediate / shape.projection_params
