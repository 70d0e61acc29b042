"""Residual addition and RMSNorm in one operation.

    r <- r + delta;   out = r / sqrt(mean(r^2) + eps) * weight

Bytes moved: a few vectors of the hidden size; no weights to speak of.
"""

from __future__ import annotations

import torch

from kernels import Launch, backend, require_shape
from kernels.selection import Selection


def reference(
    residual: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (new residual, normed vector) in the dtype of the inputs; the last axis is the hidden size."""
    residual = residual if delta is None else residual + delta
    return residual, residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps) * weight


def bind(
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    delta: torch.Tensor | None = None,
    select: Selection | None = None,
) -> Launch:
    """Bind the norm of one token. All vectors (H,) float32; `residual` is updated in place; `select` reads `out`
    next.
    """
    size = residual.shape[0]
    for name, tensor in (("residual", residual), ("weight", weight), ("out", out)):
        require_shape(name, tensor, (size,))
    if delta is not None:
        require_shape("delta", delta, (size,))
    module = backend("rmsnorm", residual)
    if residual.is_cuda:
        return module.bind(residual, weight, eps, out, delta, select)
    return module.bind(residual, weight, eps, out, delta)
