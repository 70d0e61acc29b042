"""Read kernels for the CPU: every thread sums its part of a buffer through one, four or eight streams."""

from __future__ import annotations

import functools

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import FASTMATH, PRANGE, array
from kernels.memory import empty, kept

STREAMS = (1, 4, 8)  # that a thread keeps in flight
NEAR = 0.75  # of the bytes asked for, which are several times the last-level cache


@numba.njit(parallel=PRANGE, fastmath=FASTMATH, cache=True)
def _read(data, out, streams):  # type: ignore[no-untyped-def]
    """Sum every part of data through 1, 4 or 8 streams; one function, because each that is compiled is loaded anew by
    every process.
    """
    part = data.shape[0] // out.shape[0]
    for p in numba.prange(out.shape[0]):
        n, o = part // streams, p * part
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        if streams == 1:
            for i in range(o, o + n):
                s0 += data[i]
            out[p] = s0
        elif streams == 4:
            for i in range(n):
                s0 += data[o + i]
                s1 += data[o + n + i]
                s2 += data[o + 2 * n + i]
                s3 += data[o + 3 * n + i]
            out[p] = s0 + s1 + s2 + s3
        else:
            s4, s5, s6, s7 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(n):
                s0 += data[o + i]
                s1 += data[o + n + i]
                s2 += data[o + 2 * n + i]
                s3 += data[o + 3 * n + i]
                s4 += data[o + 4 * n + i]
                s5 += data[o + 5 * n + i]
                s6 += data[o + 6 * n + i]
                s7 += data[o + 7 * n + i]
            out[p] = (s0 + s1 + s2 + s3) + (s4 + s5 + s6 + s7)


def make_buffer(count: int) -> torch.Tensor:
    """Return about `count` float32 numbers: the weights that the process keeps, where they come near to that, or as
    many allocated as weights are, in huge pages.

    With small pages the page walks cost a quarter of the bandwidth, and kernels would seem to beat memory. A gigabyte
    that was never touched takes a virtual machine up to 4 s.
    """
    weights = kept()
    if weights.numel() >= NEAR * 4 * count:
        return weights[: weights.numel() // 4 * 4].view(torch.float32)[:count]
    pattern = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    buffer = empty((count,), torch.float32, "cpu")
    whole = count // pattern.numel() * pattern.numel()
    buffer[:whole].view(-1, pattern.numel()).copy_(pattern)
    buffer[whole:] = pattern[: count - whole]
    return buffer


def bind_reads(buffer: torch.Tensor) -> list[Launch]:
    """Bind the read kernels over a float32 buffer cut into 250 parts, a few MB each, as weights lie.

    Not 256: eight streams a power of two apart fall on the same cache sets and read a fifth slower.
    """
    data = array("buffer", buffer)
    return [functools.partial(_read, data, np.empty(250, dtype=np.float32), streams) for streams in STREAMS]
