"""What a CPU benchmark line is and how it is timed: cold passes against the read bandwidth measured just before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from kernels import Launch
from kernels.cpu.bandwidth import bind_reads, make_buffer

REPEATS = 9
BUFFER_BYTES = 1 << 30


@dataclass(frozen=True)
class Line:
    """One measured line. bytes_mb: decimal MB moved per pass; share: of the read bandwidth; peer_ms: the library's
    time.
    """

    name: str
    bytes_mb: float
    ms: float
    gbps: float
    share: float
    target: float | None
    peer: str = ""
    peer_ms: float | None = None


class Bench:
    """Lines of one run. Before every pass a large buffer is read: that empties the caches and measures the read
    bandwidth.

    A share of bandwidth is the median over passes of (GB/s of the pass) / (GB/s of the read just before it): the
    bandwidth of a shared machine drifts by tens of percent within a run, and only neighbours in time compare.
    """

    def __init__(self) -> None:
        self.buffer = make_buffer(BUFFER_BYTES // 4)
        reads = bind_reads(self.buffer)
        medians = [statistics.median(timed(read) for _ in range(4)) for read in reads]
        self._read = reads[medians.index(min(medians))]
        self.read_gbps: list[float] = []

    def read(self) -> float:
        """Read the buffer; return GB/s."""
        gbps = BUFFER_BYTES / timed(self._read) / 1e6
        self.read_gbps.append(gbps)
        return gbps

    def line(
        self,
        name: str,
        target: float | None,
        run: Launch,
        moved: Callable[[], float],
        peer: tuple[str, Launch] | None = None,
    ) -> Line:
        """Time `run` over REPEATS cold passes, its peer in turn; `moved` returns the bytes of the last pass."""
        run()
        ours, shares, theirs = [], [], []
        for _ in range(REPEATS):
            before = self.read()
            ours.append(timed(run))
            shares.append(moved() / ours[-1] / 1e6 / before)
            if peer is not None:
                self.read()
                theirs.append(timed(peer[1]))
        ms, share, size = statistics.median(ours), statistics.median(shares), moved()
        label, peer_ms = ("", None) if peer is None else (peer[0], statistics.median(theirs))
        return Line(name, size / 1e6, ms, size / ms / 1e6, share, target, label, peer_ms)


def timed(run: Launch) -> float:
    """Return the ms of one call."""
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3
