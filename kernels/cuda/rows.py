"""What stands around products in Triton that do not do it themselves: norms ahead of quantised ones, silu behind both
quantised ones and those of batches.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.cuda.common import launcher, overlaps, power_of_two, wait_for_producer
from kernels.norm import Norm


@triton.jit
def _normed(x, weight, out, eps, K: tl.constexpr, SPAN: tl.constexpr, OVERLAP: tl.constexpr):
    """out[b] = x[b] / sqrt(mean(x[b]^2) + eps) * weight, one program per row."""
    wait_for_producer(OVERLAP)
    k = tl.arange(0, SPAN)
    inside = k < K
    row = tl.program_id(0).to(tl.int64) * K
    value = tl.load(x + row + k, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / K + eps)
    tl.store(out + row + k, value * scale * tl.load(weight + k, mask=inside, other=0.0), mask=inside)


@triton.jit
def _silu(both, act, N, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """act[b, n] = silu(both[b, n]) both[b, N + n]."""
    wait_for_producer(OVERLAP)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(both + row * 2 * N + n, mask=inside, other=0.0)
    up = tl.load(both + row * 2 * N + N + n, mask=inside, other=0.0)
    tl.store(act + row * N + n, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def normed(x: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, list[Callable[[], object]]]:
    """Return what a product reads instead of x (B, K), and the launches that fill it."""
    if norm is None:
        return x, []
    batch, depth = x.shape
    out = torch.empty_like(x)
    constants = {"K": depth, "SPAN": power_of_two(depth), "OVERLAP": overlaps(x)}
    return out, [launcher(_normed, (batch,), (x, norm.weight, out, norm.eps), constants, 8)]


def silu(both: torch.Tensor, act: torch.Tensor) -> Callable[[], object]:
    """Return the launch of the gated product; both (B, 2I), act (B, I)."""
    batch, width = act.shape
    constants = {"BLOCK": 1024, "OVERLAP": overlaps(act)}
    return launcher(_silu, (batch, triton.cdiv(width, 1024)), (both, act, width), constants, 4)
