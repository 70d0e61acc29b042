"""Gate and up projections with SiLU in one launch: the paired forms of the dense and the thresholded product."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.cuda import gemv, sparse_gemv
from kernels.norm import Norm
from kernels.selection import Selection


def bind(
    x: torch.Tensor,
    w: torch.Tensor,
    act: torch.Tensor,
    norm: Norm | None = None,
    chosen: gemv.Config | None = None,
) -> Callable[[], object]:
    """Bind act = silu(gate) * up from w (2I, K), gate rows first; `norm` is applied to x (K,) while reading it."""
    return gemv.bind_dense(x, w, act, None, norm, False, True, chosen)


def bind_sparse(
    x: torch.Tensor,
    w_in: torch.Tensor,
    act: torch.Tensor,
    select: Selection,
    norm: Norm | None = None,
    chosen: sparse_gemv.Config | None = None,
) -> Callable[[], object]:
    """Bind the thresholded form from w_in (K, 2I), gate columns first; the segments of `select` are (0, I, 2I)."""
    return sparse_gemv.bind_thresholded(x, w_in, act, select, None, norm, False, True, chosen)
