"""Weights in 8 and 4 bits: symmetric, 8 bits with one scale per output, 4 bits with one per output and 64 inputs.

    8 bits: w[n, k] ~ s[n] q[n, k],       q in -127 .. 127
    4 bits: w[n, k] ~ s[g, n] (c[n, k] - 8),   g = k // 64, code c in 1 .. 15

Both layouts hold the same numbers. Two codes share a byte: of every 64 neighbours along the contiguous axis (inputs
output-major, outputs input-major) byte j of 32 holds neighbour j in its low and neighbour j + 32 in its high half, so
that unpacking gives two contiguous runs. The scales of a group serve all its input channels: a sparse product adds the
codes of a group first and scales once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import ShapeError
from kernels.memory import placed

GROUP = 64  # inputs that share a scale in 4 bits, and neighbours that are packed together
HALF = GROUP // 2
BITS = (8, 4)


@dataclass(frozen=True)
class Quantised:
    """One weight (N, K) in both layouts.

    bits 8: q (N, K) int8, q_in (K, N) int8, scales (N,) float32.
    bits 4: q (N, K / 2) uint8, q_in (K, N / 2) uint8, scales (K / 64, N) float32.
    """

    bits: int
    q: torch.Tensor
    q_in: torch.Tensor
    scales: torch.Tensor

    @property
    def outputs(self) -> int:
        return self.q.shape[0]

    @property
    def inputs(self) -> int:
        return self.q_in.shape[0]

    @property
    def dense_bytes(self) -> int:
        """Bytes of all codes of one layout and of the scales."""
        return self.q.numel() + 4 * self.scales.numel()

    @property
    def row_bytes(self) -> float:
        """Bytes of one output's share of one input channel, without scales."""
        return self.bits / 8


def quantise(w: torch.Tensor, bits: int) -> Quantised:
    """Round w (N, K) to the nearest code. Raises ShapeError for other bits or, in 4 bits, sides not divisible by 64."""
    if bits not in BITS or w.dim() != 2:
        raise ShapeError(f"a weight of shape {tuple(w.shape)} in {bits} bits; give a matrix and 8 or 4 bits")
    w = w.float()
    if bits == 8:
        scales = (w.abs().amax(1) / 127).clamp(min=1e-30)
        q = torch.round(w / scales[:, None]).to(torch.int8)
        return Quantised(8, placed(q), placed(q.T), scales)
    rows, depth = w.shape
    if rows % GROUP or depth % GROUP:
        raise ShapeError(f"a weight of shape {tuple(w.shape)} in 4 bits; both sides must be multiples of {GROUP}")
    grouped = w.view(rows, depth // GROUP, GROUP)
    scales = (grouped.abs().amax(2) / 7).clamp(min=1e-30)
    codes = (torch.round(grouped / scales[:, :, None]) + 8).to(torch.uint8).view(rows, depth)
    return Quantised(4, placed(pack(codes)), placed(pack(codes.T.contiguous())), placed(scales.T))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return (rows, columns / 2) bytes of (rows, columns) codes below 16."""
    rows, columns = codes.shape
    pairs = codes.view(rows, columns // GROUP, 2, HALF)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(rows, columns // 2).contiguous()


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the (rows, columns) codes of (rows, columns / 2) bytes."""
    rows, half = packed.shape
    blocks = packed.view(rows, half // HALF, 1, HALF)
    return torch.cat((blocks & 15, blocks >> 4), dim=2).reshape(rows, 2 * half)


def dequantise(weight: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers (N, K) that a quantised weight stands for."""
    if weight.bits == 8:
        return weight.q.to(dtype) * weight.scales.to(dtype)[:, None]
    scales = weight.scales.to(dtype).T.repeat_interleave(GROUP, dim=1)
    return (unpack(weight.q).to(dtype) - 8) * scales
