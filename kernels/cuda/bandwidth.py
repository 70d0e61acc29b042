"""Streaming reads in Triton: the yardstick for the other kernels. A few read patterns; the fastest is the machine's."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.cuda.common import launcher, multiprocessors

# programs per multiprocessor, floats per program and turn, warps
PATTERNS = ((8, 4096, 4), (4, 8192, 8), (16, 2048, 4), (2, 16384, 16))


@triton.jit
def stream(buffer, out, SIZE, BLOCK: tl.constexpr):
    """out[program] = sum of every block whose index is congruent to the program's."""
    lane = tl.arange(0, BLOCK)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    ahead = tl.load(buffer + tl.program_id(0).to(tl.int64) * BLOCK + lane)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, SIZE, step):
        block = ahead
        following = start + step + lane
        ahead = tl.load(buffer + following, mask=following < SIZE, other=0.0)
        total += block
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


def make_buffer(elements: int) -> torch.Tensor:
    """Return `elements` float32 of noise on the current GPU, rounded down to whole blocks of every pattern."""
    largest = max(block for _, block, _ in PATTERNS)
    return torch.randn(max(largest, elements // largest * largest), device="cuda")


def bind_reads(buffer: torch.Tensor) -> list[Callable[[], object]]:
    """Return one launch per read pattern, each reading the whole buffer once."""
    launches = []
    for resident, block, warps in PATTERNS:
        programs = min(resident * multiprocessors(buffer), buffer.numel() // block)
        out = torch.empty(programs, device=buffer.device)
        launches.append(launcher(stream, (programs,), (buffer, out, buffer.numel()), {"BLOCK": block}, warps))
    return launches
