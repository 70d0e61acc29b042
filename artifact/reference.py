"""One decode step written out plainly in torch: what every mode must compute. Slow, and shares no code with the
kernels.

Used as a gate before any timing: a mode whose logits differ from this step is an error, never a result.
"""

from __future__ import annotations

import torch

from artifact.cache import KVCache, PackedCache
from artifact.decoder import Decoder
from artifact.models import Layer, Matrix, Weights
from artifact.projection.thresholds import Thresholds

# Float32 kernels agree with this float32 step to about 1e-6. A channel within rounding of its threshold may fall on
# either side, which moves the logits by up to about 1e-3; a wrong mask, row or position moves them by tens of
# percent.
TOLERANCE = 5e-3


@torch.inference_mode()
def step_logits(
    weights: Weights,
    cache: KVCache,
    tokens: torch.Tensor,
    thresholds: Thresholds | None,
    packed: PackedCache | None,
) -> torch.Tensor:
    """Return (V,) float32 logits of the step at position cache.tokens; caches are read and left as they are."""
    position = cache.tokens
    hidden = weights.embedding[tokens[position]].float()
    angles = position * weights.inv_freq
    for index, layer in enumerate(weights.layers):
        limits = None if thresholds is None else thresholds.values[index].to(weights.device)
        source = cache if packed is None else packed
        live = source.lengths[index].tolist()
        hidden = hidden + _attend(
            weights, layer, _norm(hidden, layer.attention_norm, weights.eps), angles, limits, source, index, live
        )
        normed = _norm(hidden, layer.mlp_norm, weights.eps)
        width = weights.shape.intermediate
        gate = _project(layer.gate_up, normed, 0, width, limits, 4)
        up = _project(layer.gate_up, normed, width, 2 * width, limits, 5)
        act = gate * torch.sigmoid(gate) * up
        hidden = hidden + _project(layer.down, act, 0, weights.shape.hidden, limits, 6)
    return weights.head.float() @ _norm(hidden, weights.final_norm, weights.eps)


def gate_step(decoder: Decoder, tolerance: float = TOLERANCE) -> float:
    """Take one step of `decoder` and return the relative L2 error of its logits. Raises RuntimeError above
    `tolerance`.
    """
    expected = step_logits(decoder.weights, decoder.cache, decoder.tokens, decoder.thresholds, decoder.packed)
    decoder.step()
    error = float((decoder.logits - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise RuntimeError(
            f"the step's logits differ from the reference step by {error:.2e} (at most {tolerance:.0e} is rounding)"
        )
    return error


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _project(
    matrix: Matrix, x: torch.Tensor, low: int, high: int, limits: torch.Tensor | None, projection: int
) -> torch.Tensor:
    """Apply rows low:high of an output-major weight to x, after zeroing channels at or below the projection's
    threshold.
    """
    if limits is not None:
        x = torch.where(x.abs() <= limits[projection], torch.zeros_like(x), x)
    y = matrix.w[low:high].float() @ x
    return y if matrix.bias is None else y + matrix.bias[low:high]


def _attend(
    weights: Weights,
    layer: Layer,
    normed: torch.Tensor,
    angles: torch.Tensor,
    limits: torch.Tensor | None,
    source: KVCache | PackedCache,
    index: int,
    live: list[int],
) -> torch.Tensor:
    shape = weights.shape
    dim, q_width, kv_width = shape.head_dim, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    bounds = (0, q_width, q_width + kv_width, q_width + 2 * kv_width)
    q, k, v = (_project(layer.qkv, normed, bounds[i], bounds[i + 1], limits, i).view(-1, dim) for i in range(3))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm, weights.eps), _norm(k, layer.k_norm, weights.eps)
    q, k = _turn(q, angles), _turn(k, angles)
    mixed = torch.empty(shape.heads, dim, device=normed.device)
    for head in range(shape.heads):
        kv = head // shape.group
        keys = torch.cat((source.keys[index, kv, : live[kv]].float(), k[kv : kv + 1]))
        values = torch.cat((source.values[index, kv, : live[kv]].float(), v[kv : kv + 1]))
        mixed[head] = torch.softmax(keys @ q[head] / dim**0.5, 0) @ values
    return _project(layer.o, mixed.reshape(-1), 0, shape.hidden, limits, 3)


def _turn(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
