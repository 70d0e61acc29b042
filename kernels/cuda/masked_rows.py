"""Masked up projection in CUDA C++ for compute capability 9.0 and later: kept rows streamed through registers.

What Triton does not offer decides here: a warp that sums its own piece of a row and waits for nobody, with several rows
under way in registers. `masked_rows.cu` holds the kernel; what it does not take (odd shapes, other dtypes, older GPUs,
no NVRTC) runs in Triton (`masked_mlp.py`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.cuda import nvrtc
from kernels.cuda.common import counters, multiprocessors, norm_arguments, power_of_two, workspace
from kernels.masked_mlp import LowRank
from kernels.norm import Norm

PIECE = 256  # inputs that a warp reads at once, 16 bytes a lane
WIDEST = 4  # pieces of a row that a warp holds
MOST_SHARED_BYTES = 48 << 10  # all of it static


@dataclass(frozen=True)
class Config:
    """Warps of a block, those that share a row, rows that a warp has under way."""

    warps: int
    pieces: int
    depth: int


def config(depth: int) -> Config | None:
    """Return the launch configuration for rows of `depth` weights, None where no number of warps divides them."""
    for vectors in range(WIDEST, 0, -1):
        pieces, rest = divmod(depth, PIECE * vectors)
        if rest == 0 and 1 <= pieces <= 16:
            return Config(16 // pieces * pieces, pieces, 4)
    return None


def shared_bytes(c: Config, owned: int, rank: int, normed: bool) -> int:
    """Return the shared memory of a block of at most `owned` rows: rows, gates and sums, counts of its warps; with an
    update the factors of its kept rows and the scratch of column sums.
    """
    words = owned * (2 + c.pieces) + c.warps * (1 + normed) + 1
    if rank:
        words += owned * (rank + 2) + 32 * c.warps // rank * rank
    return 4 * words


def takes(x: torch.Tensor, w: torch.Tensor, norm: Norm | None, low: LowRank | None) -> bool:
    """Whether this kernel runs the projection of x (K,) by w (N, K) here: else Triton does."""
    return not refusal(x, w, norm, low)


def refusal(
    x: torch.Tensor, w: torch.Tensor, norm: Norm | None, low: LowRank | None, chosen: Config | None = None
) -> str:
    """Return why this kernel does not run the projection of x (K,) by w (N, K) here, or nothing."""
    width, depth = w.shape
    c = chosen or config(depth)
    if unfit := nvrtc.refusal(w):
        return unfit
    if low is not None and _factor_type(low) not in (w.dtype, torch.float32):
        kinds = ", ".join(str(factor.dtype) for factor in (low.gate_b, low.up_b, low.down_a))
        return f"factors of the update are {kinds}, not all {w.dtype} or all float32"
    if c is None or depth % (PIECE * c.pieces):
        return f"rows of {depth} weights are not whole pieces of {PIECE} for a block's warps"
    owned, rank = math.ceil(width / multiprocessors(w)), 0 if low is None else low.rank
    if max(owned, rank) > 32 * c.warps:
        return f"{owned} rows of a block and rank {rank}, {32 * c.warps} at most"
    if any(tensor.data_ptr() % 16 for tensor in ((x, w) if norm is None else (x, w, norm.weight))):
        return "inputs, gains or weights do not begin at a multiple of 16 bytes"
    needed = shared_bytes(c, owned, rank, norm is not None)
    return f"{needed} bytes of shared memory, {MOST_SHARED_BYTES} at most" if needed > MOST_SHARED_BYTES else ""


def bind(
    gate: torch.Tensor, x: torch.Tensor, w: torch.Tensor, act: torch.Tensor, limit: torch.Tensor, kept: torch.Tensor,
    norm: Norm | None, low: LowRank | None, chosen: Config | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Bind the projection; arguments as in `kernels.masked_mlp.bind`. Raises ValueError for what `takes` refuses."""
    width, depth = w.shape
    c = chosen or config(depth)
    unfit = refusal(x, w, norm, low, chosen)
    if c is None or unfit:
        raise ValueError(f"w {tuple(w.shape)}: {unfit}; masked_mlp.bind runs it in Triton")
    rank, blocks = 0 if low is None else low.rank, min(width, multiprocessors(w))
    macros = {
        "K": depth, "WARPS": c.warps, "PIECES": c.pieces, "VECTORS": depth // (PIECE * c.pieces), "DEPTH": c.depth,
        "OWNED": math.ceil(width / blocks), "NORMED": int(norm is not None), "RANK": rank,
        "BF16": int(w.dtype == torch.bfloat16), "WIDE": int(low is not None and _factor_type(low) == torch.float32),
    }  # fmt: skip
    counts = workspace("masked rows", w, blocks).view(torch.int32)
    sums = workspace("low rank", w, blocks * power_of_two(max(rank, 1)))
    gains, eps = norm_arguments(norm, x)
    factors = (w, w, w) if low is None else (low.gate_b, low.up_b, low.down_a)
    tensors = (gate, x, gains, w, act, limit, kept, *factors, counts, sums, counters(w))
    source = nvrtc.Source("masked_rows.cu", "masked_rows", tuple(macros.items()))
    numbers = (eps, ctypes.c_float), (width, ctypes.c_int)
    return nvrtc.bind(source, nvrtc.Shape(blocks, 1, 32 * c.warps), tensors, numbers)


def _factor_type(low: LowRank) -> torch.dtype | None:
    """The one dtype of all factors, None where they differ."""
    kinds = {low.gate_b.dtype, low.up_b.dtype, low.down_a.dtype}
    return kinds.pop() if len(kinds) == 1 else None
