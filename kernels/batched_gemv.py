"""Dense product of a batch: every weight is read once for all sequences of a step.

    y[b, n] = sum_k w[n, k] n(x[b])_k + bias[n]      n: the identity or an RMSNorm (`kernels.norm`)
    y[b, n] += ...                                   with `accumulate`

Bytes moved: N K s_w whatever the batch (crossover, section 3.3: a batch shares each weight read).
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape
from kernels.norm import Norm, require_norm

MOST = 16  # sequences of a batch


def reference(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x w^T + bias in the dtype of the inputs; x (B, K), w (N, K), bias (N,)."""
    y = x @ w.T
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
    """Bind the product of a batch. x (B, K) float32 with B at most MOST, w (N, K), y (B, N) float32, bias (N,)."""
    rows, depth = w.shape
    check_batch(x, depth)
    require_shape("w", w, (rows, depth))
    require_shape("y", y, (x.shape[0], rows))
    if bias is not None:
        require_shape("bias", bias, (rows,))
    require_norm(norm, depth)
    return backend("batched_gemv", w).bind(x, w, y, bias, norm, accumulate)


def check_batch(x: torch.Tensor, depth: int) -> None:
    """Raise ShapeError unless x is a batch of vectors of this depth."""
    if x.dim() != 2 or not 1 <= x.shape[0] <= MOST:
        raise ShapeError(f"x has shape {tuple(x.shape)}; a batch is (B, K) with B from 1 to {MOST}")
    require_shape("x", x, (x.shape[0], depth))
