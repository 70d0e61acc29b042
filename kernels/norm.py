"""RMSNorm that a projection applies to its input while reading it, instead of an operation of its own.

    n(x) = x / sqrt(mean(x^2) + eps) * weight

Bytes moved: none beyond those of the projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import require_shape


@dataclass(frozen=True)
class Norm:
    """weight (K,) float32; eps in units of the mean square. x, the residual stream, stays as it is."""

    weight: torch.Tensor
    eps: float


def reference(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Return n(x) in the dtype of x, whose last axis is normed; x itself without a norm."""
    if norm is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.to(x.dtype)


def require_norm(norm: Norm | None, depth: int) -> None:
    """Raise ShapeError unless the norm's weight fits an input of `depth` channels."""
    if norm is not None:
        require_shape("norm weight", norm.weight, (depth,))
