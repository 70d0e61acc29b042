"""Dense matrix-vector product of the decode step.

    y_n = sum_k w[n, k] n(x)_k + b[n]        n: the identity or an RMSNorm (`kernels.norm`)
    y_n += ...                               with `accumulate`: y is the residual stream

Bytes moved: N K s_w (every weight once); the vectors are noise. Weights are output-major: row n holds the weights of
output n.
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape
from kernels.norm import Norm, require_norm


def reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return w x + bias in the dtype of the inputs; x (K,), w (N, K), bias (N,)."""
    y = w @ x
    return y if bias is None else y + bias


def bytes_moved(w: torch.Tensor) -> int:
    """Return the weight bytes that one call reads."""
    return w.numel() * w.element_size()


def bind(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    accumulate: bool = False,
) -> Launch:
    """Bind y = w n(x) + bias for one token, or y += ... when `accumulate`.

    x (K,) float32, w (N, K), y (N,) float32, bias (N,) or None, norm applied to x while it is read. Raises ShapeError
    for a batch of tokens: one step decodes one sequence, and a batch needs the union of its active channels, which is
    another operation.
    """
    if x.dim() != 1:
        raise ShapeError(f"x has shape {tuple(x.shape)}; gemv takes one token, shape (K,)")
    rows, depth = w.shape
    require_shape("x", x, (depth,))
    require_shape("w", w, (rows, depth))
    require_shape("y", y, (rows,))
    if bias is not None:
        require_shape("bias", bias, (rows,))
    require_norm(norm, depth)
    return backend("gemv", w).bind(x, w, y, bias, norm, accumulate)
