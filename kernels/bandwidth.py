"""Read bandwidth of the memory that decoding streams from: the denominator of every "share of peak" printed.

    bandwidth = bytes / time of summing a buffer several times larger than the last-level cache

Bytes moved: the whole buffer, once. How many read streams a thread keeps in flight decides the figure on many CPUs,
so several are tried and the quickest is repeated: a kernel cannot then look good against a slow yardstick.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from kernels import Launch, backend


@dataclass(frozen=True)
class Bandwidth:
    """GB/s (decimal): `median_gbps` of the best read kernel's repeats, and `fastest_gbps`, the single fastest pass."""

    median_gbps: float
    fastest_gbps: float

    def best(self, other: Bandwidth) -> Bandwidth:
        """Return the larger of both figures: the machine's, whichever of two measurements was disturbed."""
        return Bandwidth(max(self.median_gbps, other.median_gbps), max(self.fastest_gbps, other.fastest_gbps))


def read_bandwidth(device: torch.device, bytes_read: int = 1 << 30, repeats: int = 5) -> Bandwidth:
    """Measure the read bandwidth with the backend's read kernels on a buffer of `bytes_read` bytes."""
    module = backend("bandwidth", torch.empty(0, device=device))
    buffer = module.make_buffer(bytes_read // 4)
    moved = buffer.numel() * 4 / 1e9
    reads = module.bind_reads(buffer)
    for read in reads if device.type == "cuda" else reads[:1]:  # on the CPU they are one compiled function
        read()
    tried = [_seconds(read, device) for read in reads]
    best = reads[tried.index(min(tried))]
    times = [_seconds(best, device) for _ in range(repeats)]
    return Bandwidth(moved / statistics.median(times), moved / min(times + tried))


def _seconds(read: Launch, device: torch.device) -> float:
    """Seconds of one pass, the mean of eight on a GPU, where a pass takes a quarter of a millisecond."""
    passes = 8 if device.type == "cuda" else 1
    _wait(device)
    begin = time.perf_counter()
    for _ in range(passes):
        read()
    _wait(device)
    return (time.perf_counter() - begin) / passes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
