"""The gated MLP's product on one thread: a microsecond per thousand activations."""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import array, exp32


@numba.njit(fastmath={"contract"}, cache=True)
def _silu_product(both, act):  # type: ignore[no-untyped-def]
    width = act.shape[1]
    for b in range(act.shape[0]):
        for n in range(width):
            g = both[b, n]
            act[b, n] = g / (np.float32(1) + exp32(-g)) * both[b, width + n]


def bind(both: torch.Tensor, act: torch.Tensor) -> Launch:
    """Bind the product; shapes are checked by `kernels.silu_product.bind`."""
    return functools.partial(_silu_product, array("both", both), array("act", act))
