"""The numeric gate: one decode step, every operation compared with a plain torch form of it on the very inputs it had.

Comparing operation by operation matters for thresholded modes: a channel within rounding of its threshold may fall on
either side, and through thirty layers one flip can move the logits by ten percent. On equal inputs little of that
freedom is left: a norm that is applied while reading hides the vector which is compared with the threshold, so a
channel within AMBIGUOUS of it may be read or not, and exactly that channel's products are allowed as error. A wrong
mask, row, position or cache entry shows at the operation that made it. Shares no code with the kernels; slow; never
timed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from artifact.engine.decoder import Decoder
from artifact.engine.models import Layer, Matrix, Weights
from artifact.engine.step import Op
from artifact.projection.lora import AdaptedMask, Factors
from artifact.projection.masked import GateMask, MaskedSteps
from artifact.projection.quantised import QuantisedProjection
from artifact.projection.thresholds import Thresholds

TOLERANCE = 1e-3  # float32 accumulation differs by about 1e-6, half-precision rounding of a product by under 1e-3
# Relative to the machine epsilon of the cache: one rounding of an entry is half of it at most. Attention reads with
# queries rounded alike, so that each logit moves by that much of the products it sums: with trained weights a head's
# output moved by 1.4 epsilon (SmolLM2, float16), with synthetic ones by 0.4.
STORED_EPS, ATTENTION_EPS = 0.5, 5.0
AMBIGUOUS = 1e-5  # two float32 sums of a few thousand squares, a root and two products, relative to the threshold
ROUNDING = 2.0**-23  # of a residual addition, relative to the sum


class Gate:
    """Walks one step of a decoder and remembers the worst relative error."""

    def __init__(self, decoder: Decoder, tolerance: float) -> None:
        self.decoder, self.tolerance = decoder, tolerance
        self.worst = 0.0
        self._ops: list[Op] = decoder.next_ops().copy()

    def run(self, expected_name: str) -> None:
        """Launch the next operation, which must be of this kind."""
        op = self._ops.pop(0)
        if op.name != expected_name:
            raise RuntimeError(f"the step runs {op.name} where {expected_name} belongs")
        op.launch()

    def run_attention(self) -> None:
        """Launch attention, after rotation, append and a choice of entries where they are operations of their own."""
        while self._ops[0].name != "attention":
            self.run("choose" if self._ops[0].name == "choose" else "rope_append")
        self.run("attention")

    def run_all(self, name: str) -> None:
        """Launch operations for as long as the next one is of this kind."""
        while self._ops and self._ops[0].name == name:
            self.run(name)

    def rest(self) -> Iterator[Op]:
        """What is left of the step."""
        return iter(self._ops)

    def check(
        self,
        what: str,
        actual: torch.Tensor,
        expected: torch.Tensor,
        allowed: torch.Tensor | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """Raise RuntimeError when an output is off by more than the larger tolerance (relative L2), `allowed` apart."""
        tolerance = max(tolerance, self.tolerance)
        off = (actual.float() - expected).abs()
        if allowed is not None:
            off = off - torch.minimum(off, allowed)
        error = float(off.norm() / expected.norm().clamp(min=1e-30))
        self.worst = max(self.worst, error) if error == error else error
        if not error <= tolerance:
            raise RuntimeError(f"{what} differs from its reference by {error:.1e}; at most {tolerance:.0e} is rounding")


@torch.inference_mode()
def gate_step(decoder: Decoder, tolerance: float = TOLERANCE) -> float:
    """Take one step of `decoder`, checking every operation; return the worst relative error.

    Raises RuntimeError naming the operation and layer that is wrong.
    """
    gate, b, weights = Gate(decoder, tolerance), decoder.buffers, decoder.weights
    position, masked = decoder.cache.tokens, decoder.takes_branch()
    gate.run("embed")
    gate.check("embedding", b.residual, weights.embedding[decoder.tokens[position]].float())
    for index, layer in enumerate(weights.layers):
        _attention_half(gate, layer, index, position)
        if masked and isinstance(decoder.projections, MaskedSteps):
            _masked_half(gate, layer, index, decoder.projections)
        else:
            _mlp_half(gate, layer, index)
    gate.run("head")
    gate.check("logits", b.logits, weights.head.float() @ _norm(b.residual, weights.final_norm, weights.eps))
    for op in gate.rest():
        op.launch()
    if decoder.cache.tokens != position + 1:
        raise RuntimeError(f"the step moved the position from {position} to {decoder.cache.tokens}")
    return gate.worst


def _attention_half(gate: Gate, layer: Layer, index: int, position: int) -> None:
    decoder, b = gate.decoder, gate.decoder.buffers
    shape, eps = decoder.weights.shape, decoder.weights.eps
    where = f"of layer {index}"
    widths = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    normed = _norm(b.residual, layer.attention_norm, eps)
    gate.run("qkv")
    gate.check(f"qkv {where}", b.qkv, *_project(gate, layer.qkv, normed, index, widths, 0, AMBIGUOUS))

    q, k, v = (part.view(-1, shape.head_dim) for part in b.qkv.split(widths))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm, eps), _norm(k, layer.k_norm, eps)
    angles = position * decoder.weights.inv_freq
    q, k = _turn(q, angles), _turn(k, angles)
    gate.run_attention()
    unit = torch.finfo(decoder.cache.keys.dtype).eps
    stored = STORED_EPS * unit
    if decoder.cache.stored:
        gate.check(f"appended key {where}", decoder.cache.keys[index][:, position], k, tolerance=stored)
        gate.check(f"appended value {where}", decoder.cache.values[index][:, position], v, tolerance=stored)
    source = decoder.cache if decoder.packed is None else decoder.packed
    read = source.entries(index, 1)
    own, last = torch.arange(shape.kv_heads, device=q.device), read.lengths.long() - 1
    gate.check(f"key in the attended cache {where}", read.keys[own, last], k, tolerance=stored)
    gate.check(f"value in the attended cache {where}", read.values[own, last], v, tolerance=stored)

    mixed = torch.empty(shape.heads, shape.head_dim, device=b.mixed.device)
    for kv, live in enumerate(read.lengths.tolist()):
        group = slice(kv * shape.group, (kv + 1) * shape.group)
        weights = torch.softmax(q[group] @ read.keys[kv, :live].float().T / shape.head_dim**0.5, -1)
        mixed[group] = weights @ read.values[kv, :live].float()
    gate.check(f"attention {where}", b.mixed, mixed.view(-1), tolerance=ATTENTION_EPS * unit)
    _added(gate, "o", where, *_project(gate, layer.o, b.mixed, index, (shape.hidden,), 3))


def _mlp_half(gate: Gate, layer: Layer, index: int) -> None:
    b, shape = gate.decoder.buffers, gate.decoder.weights.shape
    where = f"of layer {index}"
    normed = _norm(b.residual, layer.mlp_norm, gate.decoder.weights.eps)
    both, off = _project(gate, layer.gate_up, normed, index, (shape.intermediate,) * 2, 4, AMBIGUOUS)
    (gate_part, up), (gate_off, up_off) = both.chunk(2), off.chunk(2)
    act = gate_part * torch.sigmoid(gate_part)
    # The slope of silu is at most 1.1.
    allowed = 1.1 * gate_off * (up.abs() + up_off) + act.abs() * up_off
    gate.run("gate_up")
    gate.check(f"gate and up {where}", b.act, act * up, allowed)
    _added(gate, "down", where, *_project(gate, layer.down, b.act, index, (shape.hidden,), 6))


def _masked_half(gate: Gate, layer: Layer, index: int, steps: MaskedSteps) -> None:
    """The MLP under a gate mask, which is compared on the very gate that the step computed, with or without adapter."""
    decoder, shape = gate.decoder, gate.decoder.weights.shape
    mask, own, fused = _masked_parts(decoder.projection, index, decoder.weights)
    width, where = shape.intermediate, f"of layer {index}"
    normed = _norm(decoder.buffers.residual, layer.mlp_norm, decoder.weights.eps)
    both = layer.gate_up.w.float() @ normed
    gate.run("gate")
    gate.run_all("low_rank")
    seen = steps.gate[:width].clone()
    if own is not None and fused:
        seen += own.gate[1].to(seen.device).float() @ steps.gate[width : width + own.gate[1].shape[1]]
    gate.check(f"gate {where}", seen, both[:width] + _low_rank(own, "gate", normed))

    silu = seen * torch.sigmoid(seen)
    limit = float(mask.limits[index])
    product = silu * (both[width:] + _low_rank(own, "up", normed))
    close = (silu.abs() - limit).abs() <= AMBIGUOUS * abs(limit)
    gate.run("up")
    kept = torch.where(silu.abs() <= limit, torch.zeros_like(product), product)
    gate.check(f"up {where}", steps.act[:width], kept, torch.where(close, product.abs(), torch.zeros_like(product)))

    act = steps.act[:width].clone()
    expected = layer.down.w.float() @ act + _low_rank(own, "down", act)
    expected += 0.0 if layer.down.bias is None else layer.down.bias
    _added(gate, "down", where, expected, torch.zeros_like(expected), "low_rank")


def _masked_parts(branch: object, index: int, weights: Weights) -> tuple[GateMask, Factors | None, bool]:
    """The mask, the layer's factors in the precision of the weights, and whether they ride on other products."""
    if isinstance(branch, AdaptedMask):
        return branch.mask, branch.adapter.to(weights).layers[index], branch.fused
    if isinstance(branch, GateMask):
        return branch, None, False
    raise TypeError(f"a step with a gate mask has the branch {type(branch).__name__}")


def _low_rank(own: Factors | None, name: str, x: torch.Tensor) -> torch.Tensor:
    """B A x of one projection, zero without factors."""
    if own is None:
        return torch.zeros((), device=x.device)
    a, b = (one.to(x.device).float() for one in getattr(own, name))
    return b @ (a @ x)


def _added(gate: Gate, name: str, where: str, expected: torch.Tensor, allowed: torch.Tensor, and_all: str = "") -> None:
    """Run a projection that adds to the residual stream, and what follows of the kind `and_all`; check what was added,
    the sum's own rounding apart.
    """
    residual = gate.decoder.buffers.residual
    before = residual.clone()
    gate.run(name)
    gate.run_all(and_all)
    gate.check(f"{name} {where}", residual - before, expected, allowed + ROUNDING * residual.abs())


def _project(
    gate: Gate, matrix: Matrix, x: torch.Tensor, index: int, widths: tuple[int, ...], first: int, band: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a fused projection after zeroing, per part, the channels at or below the part's threshold.

    Returns the outputs and, per output, what the channels within `band` of a threshold may change.
    """
    branch = gate.decoder.projection
    branch = branch.thresholds if isinstance(branch, QuantisedProjection) else branch
    thresholds = branch if isinstance(branch, Thresholds) else None
    parts, allowed, start = [], [], 0
    for offset, width in enumerate(widths):
        w = matrix.w[start : start + width]
        kept, off = x, torch.zeros(width, device=x.device)
        if thresholds is not None:
            limit = thresholds.values[index, first + offset].to(x.device)
            kept = torch.where(x.abs() <= limit, torch.zeros_like(x), x)
            close = ((x.abs() - limit).abs() <= band * limit.abs()).nonzero()[:, 0]
            off = w[:, close].float().abs() @ x[close].abs() if band > 0 else off
        parts.append(w.float() @ kept)
        allowed.append(off)
        start += width
    y = torch.cat(parts)
    return (y if matrix.bias is None else y + matrix.bias), torch.cat(allowed)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _turn(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
