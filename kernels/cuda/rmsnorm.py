"""Residual addition and RMSNorm in Triton, for callers that do not let a projection apply the norm."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.cuda.common import launcher, overlaps, power_of_two, wait_for_producer
from kernels.selection import Selection


@triton.jit
def add_and_norm(
    residual, weight, out, delta, eps, K: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr
):
    """residual += delta; out = residual / rms * weight, by one program."""
    k = tl.arange(0, SPAN)
    live = k < K
    gain = tl.load(weight + k, mask=live, other=0.0)
    wait_for_producer(OVERLAP)
    value = tl.load(residual + k, mask=live, other=0.0)
    if ADD:
        value += tl.load(delta + k, mask=live, other=0.0)
        tl.store(residual + k, value, mask=live)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / K + eps)
    tl.store(out + k, value * scale * gain, mask=live)


def bind(
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    delta: torch.Tensor | None = None,
    select: Selection | None = None,
) -> Callable[[], object]:
    """Bind the norm of one token; all vectors (H,) float32, `residual` updated in place."""
    size = residual.shape[0]
    constants = {"K": size, "SPAN": power_of_two(size), "ADD": delta is not None, "OVERLAP": overlaps(residual)}
    arguments = (residual, weight, out, residual if delta is None else delta, eps)
    return launcher(add_and_norm, (1,), arguments, constants, 8 if size >= 2048 else 4)
