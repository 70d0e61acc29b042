"""A low-rank adapter on the gated MLP (LoRA), run on the masked path: W + B A for gate, up and down.

Tokens on the base path take the base weights alone, so that what routing keeps is the model as published. The update
needs no small products of its own: the rows of A for gate and up ride on the gate's dense product, B is applied where
the mask is decided, A of down is summed there too, and B of down is r more rows of the down projection. `UnfusedSteps`
is the plain form, five more launches a layer, to be measured against.

Adapters are kept as `peft` writes them: adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from artifact.engine.models import Layer, Weights
from artifact.engine.step import Buffers, Op
from artifact.errors import UserError, one_line
from artifact.projection.dense import linear
from artifact.projection.masked import GateMask, MaskedRows, MaskedSteps
from artifact.shapes import Shape
from kernels import gemv, masked_mlp, sparse_gemv
from kernels.masked_mlp import LowRank
from kernels.norm import Norm
from kernels.selection import Selection

TARGETS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Factors:
    """One layer: a (r, inputs) and b (outputs, r) of gate, up and down; the scale alpha / r is in b."""

    gate: tuple[torch.Tensor, torch.Tensor]
    up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Adapter:
    """Factors of every layer, all of one rank."""

    layers: tuple[Factors, ...]

    @property
    def rank(self) -> int:
        return int(self.layers[0].gate[0].shape[0])

    def to(self, weights: Weights) -> Adapter:
        """The factors on the device and in the dtype of the weights they change."""

        def moved(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = (one.to(weights.device, weights.dtype).contiguous() for one in pair)
            return a, b

        return Adapter(tuple(Factors(moved(f.gate), moved(f.up), moved(f.down)) for f in self.layers))

    def require_fit(self, shape: Shape) -> None:
        """Raise UserError unless every factor has the shape that the model's MLP needs."""
        wide, narrow, r = shape.intermediate, shape.hidden, self.rank
        expected = {"gate": ((r, narrow), (wide, r)), "up": ((r, narrow), (wide, r)), "down": ((r, wide), (narrow, r))}
        if len(self.layers) != shape.layers:
            raise UserError(
                f"the adapter has {len(self.layers)} layers, the model {shape.layers}; fine-tune this model"
            )
        for index, layer in enumerate(self.layers):
            for name, shapes in expected.items():
                found = tuple(tuple(one.shape) for one in getattr(layer, name))
                if found != shapes:
                    raise UserError(f"the adapter's {name} of layer {index} is {found}, the model needs {shapes}")


@dataclass(frozen=True)
class AdaptedMask:
    """A gate mask whose masked path carries an adapter. fused: without small products of their own."""

    mask: GateMask
    adapter: Adapter
    fused: bool = True

    @property
    def limits(self) -> torch.Tensor:
        return self.mask.limits

    def bind(self, weights: Weights, buffers: Buffers) -> AdaptedSteps:
        self.mask.require_fit(weights.shape)
        self.adapter.require_fit(weights.shape)
        adapter = self.adapter.to(weights)
        if self.fused:
            return AdaptedSteps(weights, buffers, self.mask, adapter)
        if self.mask.routed is not None:
            raise UserError("separate low-rank products cannot be left out per token; route with the fused form")
        return UnfusedSteps(weights, buffers, self.mask, adapter)

    def rows(self, weights: Weights) -> AdaptedRows:
        self.mask.require_fit(weights.shape)
        self.adapter.require_fit(weights.shape)
        return AdaptedRows(weights, self.mask, self.adapter.to(weights))


class AdaptedSteps(MaskedSteps):
    """As many launches as without an adapter, on copies of gate and down that hold its rows."""

    def __init__(self, weights: Weights, buffers: Buffers, branch: GateMask, adapter: Adapter) -> None:
        self.rank, self.adapter = adapter.rank, adapter
        super().__init__(weights, buffers, branch)

    def gate_rows(self, index: int, layer: Layer) -> torch.Tensor:
        own = self.adapter.layers[index]
        return torch.cat((super().gate_rows(index, layer), own.gate[0], own.up[0])).contiguous()

    def down_rows(self, index: int, layer: Layer) -> torch.Tensor:
        return torch.cat((super().down_rows(index, layer), self.adapter.layers[index].down[1].T)).contiguous()

    def low_rank(self, index: int) -> LowRank | None:
        own = self.adapter.layers[index]
        return LowRank(own.gate[1], own.up[1], own.down[0].T.contiguous())

    def bytes_read(self, steps: int) -> float:
        """The rows of A ride on every step; B of gate on masked ones; B of up and A of down on their kept rows."""
        shape, item = self.weights.shape, self.weights.embedding.element_size()
        total = self.counters[1].double()
        masked = total[:, 1]
        # A step on the base path reads all I rows of up and none of the factors.
        kept = total[:, 0] - (steps - masked) * shape.intermediate
        factors = self.rank * (2 * shape.hidden * steps + shape.intermediate * masked + 2 * kept).sum()
        return super().bytes_read(steps) + float(factors) * item / steps


class UnfusedSteps(AdaptedSteps):
    """The adapter as products of its own, added before the mask and after the down projection."""

    def __init__(self, weights: Weights, buffers: Buffers, branch: GateMask, adapter: Adapter) -> None:
        super().__init__(weights, buffers, branch, adapter)
        shape, device = weights.shape, weights.device
        self.gate = torch.zeros(shape.intermediate + 2, dtype=torch.float32, device=device)
        self.gate[-1] = 1.0  # the update of up enters the mask's launch as a factor of rank one
        self.act = torch.zeros(shape.intermediate + 1, dtype=torch.float32, device=device)
        self.update = torch.zeros(shape.intermediate, dtype=torch.float32, device=device)
        self.small = torch.zeros(2, adapter.rank, dtype=torch.float32, device=device)

    def mlp(self, index: int, layer: Layer) -> list[Op]:
        b, width, own = self.buffers, self.weights.shape.intermediate, self.adapter.layers[index]
        norm, kept = Norm(layer.mlp_norm, self.weights.eps), self.counters[0][index]
        gate, act, w = self.gate[:width], self.act[:width], layer.gate_up.w
        none = torch.zeros(width, 1, dtype=torch.float32, device=w.device)
        low = LowRank(none, self.update.view(-1, 1), none)
        select = Selection(self._nothing, (0, self.weights.shape.hidden), kept[2:])
        limit, up, down = self.limits[index : index + 1], w[width:], layer.down
        masked = masked_mlp.bind(self.gate, b.residual, up, self.act, limit, kept[:1], norm, low)
        return [
            Op("gate", gemv.bind(b.residual, w[:width], gate, norm=norm)),
            Op("low_rank", gemv.bind(b.residual, own.gate[0], self.small[0], norm=norm)),
            Op("low_rank", gemv.bind(self.small[0], own.gate[1], gate, accumulate=True)),
            Op("low_rank", gemv.bind(b.residual, own.up[0], self.small[1], norm=norm)),
            Op("low_rank", gemv.bind(self.small[1], own.up[1], self.update)),
            Op("up", masked),
            Op("down", sparse_gemv.bind(act, down.w_in, b.residual, select, down.bias, None, True)),
            Op("low_rank", gemv.bind(act, own.down[0], self.small[0])),
            Op("low_rank", gemv.bind(self.small[0], own.down[1], b.residual, accumulate=True)),
        ]

    def bytes_read(self, steps: int) -> float:
        shape, item = self.weights.shape, self.weights.embedding.element_size()
        factors = 3 * self.rank * (shape.hidden + shape.intermediate) * shape.layers
        return MaskedSteps.bytes_read(self, steps) + float(factors * item)


class AdaptedRows(MaskedRows):
    """The adapted, masked MLP of many rows; rows on the base path are the base model's."""

    def __init__(self, weights: Weights, branch: GateMask, adapter: Adapter) -> None:
        super().__init__(weights, branch)
        self.adapter = adapter

    def mlp(self, index: int, layer: Layer, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        own, masked = self.adapter.layers[index], self.branch.takes_masked_path(tokens)
        gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
        act = self.activation(index, gate + update(x, own.gate, masked), up + update(x, own.up, masked), masked)
        return linear(act, layer.down) + update(act, own.down, masked)


def update(x: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], masked: torch.Tensor) -> torch.Tensor:
    """Return (m, N) float32: B A x for the rows of x (m, K) that are masked (m,), zero for the others."""
    a, b = factors
    return torch.where(masked[:, None], x @ a.float().T @ b.float().T, 0.0)


def random_adapter(shape: Shape, rank: int, seed: int = 0, size: float = 0.02) -> Adapter:
    """Normal factors of the right shapes, for timing where none was trained; size scales B A against its input."""
    generator = torch.Generator().manual_seed(seed)

    def pair(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        return a, torch.randn(outputs, rank, generator=generator) * size

    wide, narrow = shape.intermediate, shape.hidden
    return Adapter(
        tuple(Factors(pair(wide, narrow), pair(wide, narrow), pair(narrow, wide)) for _ in range(shape.layers))
    )


def load_adapter(folder: Path) -> Adapter:
    """Read an adapter as `peft` saves it. Raises UserError when it is none, or changes more than the MLP."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(str(folder / "adapter_model.safetensors"))
        rank, scale = int(config["r"]), float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(
            f"{folder.name} holds no readable adapter ({one_line(error)}); make one with `artifact finetune`"
        ) from error
    found = _by_layer(folder, tensors)
    layers = []
    for index in range(len(found)):
        parts = found.get(index, {})
        if set(parts) != {(target, side) for target in TARGETS for side in "AB"}:
            raise UserError(f"{folder.name} does not adapt gate, up and down of layer {index}; fine-tune all three")
        layers.append(Factors(*((parts[t, "A"].float(), parts[t, "B"].float() * scale) for t in TARGETS)))
    adapter = Adapter(tuple(layers))
    if not layers or adapter.rank != rank:
        raise UserError(f"{folder.name} holds factors of another rank than its configuration's {rank}; make it again")
    return adapter


def _by_layer(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[int, dict[tuple[str, str], torch.Tensor]]:
    """Tensors by layer, target and side ("A" or "B")."""
    found: dict[int, dict[tuple[str, str], torch.Tensor]] = {}
    for name, value in tensors.items():
        words = name.split(".")
        if "mlp" not in words or words[-1] != "weight" or words[-2] not in ("lora_A", "lora_B"):
            raise UserError(f"{folder.name} adapts {name}; only LoRA on gate, up and down is supported")
        at = words.index("layers")
        found.setdefault(int(words[at + 1]), {})[words[-3], words[-2][-1]] = value
    return found
