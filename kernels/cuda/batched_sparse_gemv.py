"""Thresholded product of a batch in Triton; the kernel lies beside the dense one."""

from __future__ import annotations

import torch

from kernels import Launch
from kernels.cuda.batched_gemv import bind_product
from kernels.norm import Norm
from kernels.selection import Selection


def bind(
    x: torch.Tensor,
    w_in: torch.Tensor,
    y: torch.Tensor,
    select: Selection,
    own: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    accumulate: bool,
) -> Launch:
    """Bind the thresholded product; shapes are checked by `kernels.batched_sparse_gemv.bind`."""
    return bind_product(x, w_in, y, select, own, bias, norm, accumulate)
