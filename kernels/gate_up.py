"""Gate and up projections of the gated MLP in one operation.

    act = silu(z W_gate) * (z W_up),   silu(g) = g / (1 + exp(-g)),   z = n(x), the identity or an RMSNorm

Bytes moved: dense 2 I K s_w; sparse (kept_gate + kept_up) I s_w. The sparse form skips input channels below the
thresholds of the gate and of the up projection, which may differ.
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape
from kernels.norm import Norm, require_norm
from kernels.selection import Selection, mask


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the dense product in the dtype of the inputs; x (K,), w (2I, K) with the gate's rows first."""
    gate, up = (w @ x).chunk(2)
    return torch.nn.functional.silu(gate) * up


def reference_sparse(x: torch.Tensor, w_in: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Return the thresholded product; x (K,), w_in (K, 2I) with the gate's columns first, thresholds (2,)."""
    gate_in, up_in = w_in.chunk(2, dim=1)
    zero = torch.zeros((), dtype=x.dtype)
    gate = torch.where(mask(x, thresholds[0]), x, zero) @ gate_in
    up = torch.where(mask(x, thresholds[1]), x, zero) @ up_in
    return torch.nn.functional.silu(gate) * up


def _check(x: torch.Tensor, act: torch.Tensor, depth: int, columns: int) -> None:
    if x.dim() != 1:
        raise ShapeError(f"x has shape {tuple(x.shape)}; gate_up takes one token, shape (K,)")
    if columns % 2:
        raise ShapeError(f"the fused gate|up weight has {columns} outputs, an odd number")
    require_shape("x", x, (depth,))
    require_shape("act", act, (columns // 2,))


def bind(x: torch.Tensor, w: torch.Tensor, act: torch.Tensor, norm: Norm | None = None) -> Launch:
    """Bind the dense form. x (K,) float32, w (2I, K), act (I,) float32 output; norm is applied to x as it is read."""
    _check(x, act, w.shape[1], w.shape[0])
    require_norm(norm, w.shape[1])
    return backend("gate_up", w).bind(x, w, act, norm)


def bind_sparse(
    x: torch.Tensor, w_in: torch.Tensor, act: torch.Tensor, select: Selection, norm: Norm | None = None
) -> Launch:
    """Bind the thresholded form. x (K,) float32, w_in (K, 2I), act (I,) float32 output, select over the segments
    (0, I, 2I), norm applied to x before it is compared with the thresholds.
    """
    depth, columns = w_in.shape
    _check(x, act, depth, columns)
    if select.segments != (0, columns // 2, columns):
        raise ShapeError(f"segments {select.segments} must be (0, {columns // 2}, {columns}): gate, then up")
    require_norm(norm, depth)
    return backend("gate_up", w_in).bind_sparse(x, w_in, act, select, norm)
