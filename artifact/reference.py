"""The numeric gate: one decode step, every operation compared with a plain torch form of it on the very inputs it had.

Comparing operation by operation matters for thresholded modes: a channel within rounding of its threshold may fall on
either side, and through thirty layers one flip can move the logits by ten percent. On equal inputs there is no such
freedom, and a wrong mask, row, position or cache entry shows at the operation that made it. Shares no code with the
kernels; slow; never timed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from artifact.decoder import Decoder, Op
from artifact.models import Layer, Matrix

TOLERANCE = 1e-3  # float32 accumulation differs by about 1e-6, half-precision rounding of a product by under 1e-3


class Gate:
    """Walks one step of a decoder and remembers the worst relative error."""

    def __init__(self, decoder: Decoder, tolerance: float) -> None:
        self.decoder, self.tolerance = decoder, tolerance
        self.worst = 0.0
        self._ops: Iterator[Op] = iter(decoder.ops)

    def run(self, expected_name: str) -> None:
        """Launch the next operation, which must be of this kind."""
        op = next(self._ops)
        if op.name != expected_name:
            raise RuntimeError(f"the step runs {op.name} where {expected_name} belongs")
        op.launch()

    def check(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise RuntimeError when an operation's output is off by more than the tolerance (relative L2 error)."""
        error = float((actual.float() - expected).norm() / expected.norm().clamp(min=1e-30))
        self.worst = max(self.worst, error) if error == error else error
        if not error <= self.tolerance:
            raise RuntimeError(
                f"{what} differs from its reference by {error:.1e}; at most {self.tolerance:.0e} is rounding"
            )


@torch.inference_mode()
def gate_step(decoder: Decoder, tolerance: float = TOLERANCE) -> float:
    """Take one step of `decoder`, checking every operation; return the worst relative error.

    Raises RuntimeError naming the operation and layer that is wrong.
    """
    gate, b, weights = Gate(decoder, tolerance), decoder.buffers, decoder.weights
    position = decoder.cache.tokens
    gate.run("embed")
    gate.check("embedding", b.residual, weights.embedding[decoder.tokens[position]].float())
    for index, layer in enumerate(weights.layers):
        _attention_half(gate, layer, index, position)
        _mlp_half(gate, layer, index)
    _norm_op(gate, "final norm", weights.final_norm, b.delta)
    gate.run("head")
    gate.check("logits", b.logits, weights.head.float() @ b.normed)
    for op in gate._ops:
        op.launch()
    if decoder.cache.tokens != position + 1:
        raise RuntimeError(f"the step moved the position from {position} to {decoder.cache.tokens}")
    return gate.worst


def _attention_half(gate: Gate, layer: Layer, index: int, position: int) -> None:
    decoder, b = gate.decoder, gate.decoder.buffers
    shape, eps = decoder.weights.shape, decoder.weights.eps
    where = f"of layer {index}"
    _norm_op(gate, f"attention norm {where}", layer.attention_norm, None if index == 0 else b.delta)
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate.run("qkv")
    gate.check(f"qkv {where}", b.qkv, _project(gate, layer.qkv, b.normed, index, (q_width, kv_width, kv_width), 0))

    q, k, v = (part.view(-1, shape.head_dim) for part in b.qkv.split((q_width, kv_width, kv_width)))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm, eps), _norm(k, layer.k_norm, eps)
    angles = position * decoder.weights.inv_freq
    q, k = _turn(q, angles), _turn(k, angles)
    source = decoder.cache if decoder.packed is None else decoder.packed
    slots = source.lengths[index].tolist()
    gate.run("rope_append")
    gate.check(f"rotated query {where}", b.query, q)
    gate.check(f"appended key {where}", decoder.cache.keys[index][:, position], k)
    gate.check(f"appended value {where}", decoder.cache.values[index][:, position], v)
    for head, slot in enumerate(slots):
        gate.check(f"key in the attended cache {where}", source.keys[index, head, slot], k[head])

    mixed = torch.empty(shape.heads, shape.head_dim, device=b.mixed.device)
    for head in range(shape.heads):
        kv = head // shape.group
        keys = source.keys[index, kv, : slots[kv] + 1].float()
        weights = torch.softmax(keys @ b.query[head] / shape.head_dim**0.5, 0)
        mixed[head] = weights @ source.values[index, kv, : slots[kv] + 1].float()
    gate.run("attention")
    gate.check(f"attention {where}", b.mixed, mixed.view(-1))
    gate.run("o")
    gate.check(f"o {where}", b.delta, _project(gate, layer.o, b.mixed, index, (shape.hidden,), 3))


def _mlp_half(gate: Gate, layer: Layer, index: int) -> None:
    b, shape = gate.decoder.buffers, gate.decoder.weights.shape
    where = f"of layer {index}"
    _norm_op(gate, f"MLP norm {where}", layer.mlp_norm, b.delta)
    both = _project(gate, layer.gate_up, b.normed, index, (shape.intermediate, shape.intermediate), 4)
    gate_part, up = both.chunk(2)
    gate.run("gate_up")
    gate.check(f"gate and up {where}", b.act, gate_part * torch.sigmoid(gate_part) * up)
    gate.run("down")
    gate.check(f"down {where}", b.delta, _project(gate, layer.down, b.act, index, (shape.hidden,), 6))


def _norm_op(gate: Gate, what: str, weight: torch.Tensor, delta: torch.Tensor | None) -> None:
    b = gate.decoder.buffers
    residual = b.residual.clone() if delta is None else b.residual + delta
    gate.run("norm")
    gate.check(f"residual before the {what}", b.residual, residual)
    gate.check(what, b.normed, _norm(residual, weight, gate.decoder.weights.eps))


def _project(
    gate: Gate, matrix: Matrix, x: torch.Tensor, index: int, widths: tuple[int, ...], first: int
) -> torch.Tensor:
    """Apply a fused projection after zeroing, per part, the channels at or below the part's threshold."""
    thresholds = gate.decoder.thresholds
    parts, start = [], 0
    for offset, width in enumerate(widths):
        kept = x
        if thresholds is not None:
            limit = thresholds.values[index, first + offset].to(x.device)
            kept = torch.where(x.abs() <= limit, torch.zeros_like(x), x)
        parts.append(matrix.w[start : start + width].float() @ kept)
        start += width
    y = torch.cat(parts)
    return y if matrix.bias is None else y + matrix.bias


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _turn(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
