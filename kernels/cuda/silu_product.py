"""The gated MLP's product in Triton."""

from __future__ import annotations

import torch

from kernels import Launch
from kernels.cuda.rows import silu


def bind(both: torch.Tensor, act: torch.Tensor) -> Launch:
    """Bind the product; shapes are checked by `kernels.silu_product.bind`."""
    return silu(both, act)
