"""Thresholded product in CUDA C++ for compute capability 9.0 and later: kept rows streamed by asynchronous copies.

Triton offers neither clusters with distributed shared memory nor copies that only the asking thread waits for; both
decide here. A cluster of two blocks owns a tile of columns, one block on every multiprocessor: a multiprocessor reads
at most 48 GB/s from L2 and 34 are its share of the memory's bandwidth, so two blocks on one are slower than two on
two, and clusters of more than two leave multiprocessors without a block. Sums are added in a fixed order: the same
bits every time. `sparse_rows.cu` holds the kernel (`nvrtc.py` compiles it when a launch is bound). What it does not
take (float32, odd shapes, older GPUs, no NVRTC) runs in Triton (`sparse_gemv.py`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.cuda import nvrtc
from kernels.cuda.common import (
    SHARED_MEMORY_PERCENT,
    column_tiles,
    multiprocessors,
    norm_arguments,
    power_of_two,
    shared_memory,
)
from kernels.norm import Norm
from kernels.selection import Selection

# Shared memory that a multiprocessor can be set to lend (CUDA C++ Programming Guide, compute capabilities 8.0 to 12.x).
CAPACITIES_BYTES = tuple(size << 10 for size in (8, 16, 32, 64, 100, 132, 164, 196, 228))
WIDEST = 1024  # columns of a tile


@dataclass(frozen=True)
class Config:
    """columns of a tile (of each part), blocks that share it, warps, stages per warp, a warp's rows per stage (of one
    512-byte piece each).
    """

    columns: int
    cluster: int
    warps: int
    depth: int
    rows: int


def config(segments: tuple[int, ...], depth: int, dealt: bool, processors: int) -> Config:
    """Return the launch configuration: the narrowest tiles of which one wave of clusters covers the columns.

    dealt: every block needs all `depth` inputs anyway (a norm over one part), so that a cluster would share no work
    but the rows: then a block per tile. Otherwise two blocks share a tile, and more warps a long list.
    """
    cluster = 1 if dealt else 2
    width = 32
    while width < WIDEST and cluster * len(column_tiles(segments, width)) > processors:
        width += 8
    rows = 2 if width <= 256 else 1
    return Config(width, cluster, 32, 4, 1) if depth > 8192 and rows == 2 else Config(width, cluster, 16, 3, rows)


def whole_bytes(per_multiprocessor: int) -> int:
    """Return the dynamic shared memory, in bytes, with which no second block of the kernel joins the first on a
    multiprocessor (H200: 105,000): over half of what it lends, the next capacity above `SHARED_MEMORY_PERCENT`.
    """
    wanted = per_multiprocessor * SHARED_MEMORY_PERCENT / 100
    lent = min((size for size in CAPACITIES_BYTES if size >= wanted), default=per_multiprocessor)
    return math.ceil(lent / 2 / 5000) * 5000


@dataclass(frozen=True)
class Product:
    """What is compiled for: input channels, parts (2: gated), dtype and what rides along."""

    depth: int
    parts: int
    bfloat: bool
    normed: bool
    biased: bool
    accumulate: bool

    def macros(self, c: Config) -> dict[str, int]:
        """Return the macros of sparse_rows.cu. A norm needs all inputs in every block, so its blocks deal kept rows
        evenly; without one a block scans its share of the channels only.
        """
        share = math.ceil(math.ceil(self.depth / 8) / c.cluster) * 8
        return {
            "K": self.depth, "SLICE": self.depth if self.normed or c.cluster == 1 else share, "PARTS": self.parts,
            "NORMED": int(self.normed), "ACCUMULATE": int(self.accumulate), "BIASED": int(self.biased),
            "BF16": int(self.bfloat), "COLUMNS": max(64, power_of_two(c.columns)), "CLUSTER": c.cluster,
            "WARPS": c.warps, "DEPTH": c.depth, "ROWS": c.rows,
        }  # fmt: skip

    def fits(self, c: Config) -> bool:
        """Whether sparse_rows.cu compiles for this: what its static_asserts ask for."""
        m, threads, ring = self.macros(c), 32 * c.warps, self._ring_bytes(c)
        for_inputs = 16 * self._quads(c) * threads if m["SLICE"] == self.depth and c.cluster > 1 else 0
        whole = self.depth % 4 == 0 and m["SLICE"] % 4 == 0 and c.warps % self.parts == 0
        narrow = math.ceil(m["COLUMNS"] / c.cluster) <= threads
        return whole and narrow and ring >= 4 * m["COLUMNS"] and c.warps * ring >= for_inputs

    def dynamic_bytes(self, c: Config, per_multiprocessor: int) -> int:
        """Return the dynamic shared memory of a block: the rings of its warps and the list of its kept rows, at least
        what keeps a second block away.
        """
        m = self.macros(c)
        dealt = math.ceil(self.depth / c.cluster) if m["SLICE"] == self.depth else m["SLICE"]
        return max(whole_bytes(per_multiprocessor), c.warps * self._ring_bytes(c) + self.parts * dealt * 8)

    def static_bytes(self, c: Config) -> int:
        """Return the static shared memory of a block: the bit map of kept channels with its prefix sums, received
        sums, counts, sums of squares.
        """
        words, share = 4 * self._quads(c) * c.warps, math.ceil(self.macros(c)["COLUMNS"] / c.cluster)
        values = self.parts * (2 * words + 1 + c.cluster * (share + 1)) + c.warps * self.normed
        return math.ceil(4 * values / 128) * 128  # where the dynamic part begins

    def _ring_bytes(self, c: Config) -> int:
        return c.depth * c.rows * max(512, 2 * self.macros(c)["COLUMNS"])

    def _quads(self, c: Config) -> int:
        return math.ceil(self.macros(c)["SLICE"] / 4 / (32 * c.warps))


def takes(x: torch.Tensor, w_in: torch.Tensor, segments: tuple[int, ...], norm: Norm | None, paired: bool) -> bool:
    """Whether this kernel runs the product of x (K,) and w_in (K, N) here: else Triton does."""
    return not refusal(x, w_in, segments, norm, paired)


def refusal(
    x: torch.Tensor, w_in: torch.Tensor, segments: tuple[int, ...], norm: Norm | None, paired: bool,
    chosen: Config | None = None,
) -> str:  # fmt: skip
    """Return why this kernel does not run the product of x (K,) and w_in (K, N) here, or nothing."""
    if unfit := nvrtc.refusal(w_in):
        return unfit
    if any(n % 8 for n in (*segments, *w_in.shape)):
        return f"inputs and segments {segments} are not multiples of 8"
    if any(tensor.data_ptr() % 16 for tensor in ((x, w_in) if norm is None else (x, w_in, norm.weight))):
        return "inputs, gains or weights do not begin at a multiple of 16 bytes"
    product = Product(w_in.shape[0], 2 if paired else 1, False, norm is not None, False, False)
    c = chosen or _chosen(product, segments, w_in)
    if not product.fits(c):
        return f"a tile of {c.columns} columns has no room beside {product.depth} inputs"
    per_multiprocessor, most = shared_memory(w_in)
    needed = product.dynamic_bytes(c, per_multiprocessor) + product.static_bytes(c)
    return f"{needed} bytes of shared memory, {most} at most" if needed > most else ""


def bind(
    x: torch.Tensor, w_in: torch.Tensor, y: torch.Tensor, select: Selection, bias: torch.Tensor | None,
    norm: Norm | None, accumulate: bool, paired: bool, chosen: Config | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Bind the product; arguments as in `sparse_gemv.bind_thresholded`. Raises ValueError for what `takes` refuses."""
    depth, outputs = w_in.shape[0], y.shape[0]
    segments = (0, outputs) if paired else select.segments
    if unfit := refusal(x, w_in, segments, norm, paired, chosen):
        raise ValueError(f"w_in {tuple(w_in.shape)}: {unfit}; sparse_gemv.bind runs it in Triton")
    bfloat = w_in.dtype == torch.bfloat16
    product = Product(depth, 2 if paired else 1, bfloat, norm is not None, bias is not None, accumulate)
    c = chosen or _chosen(product, segments, w_in)
    table = torch.tensor(column_tiles(segments, c.columns), dtype=torch.int32, device=w_in.device)
    gains, eps = norm_arguments(norm, x)
    offsets = y if bias is None else bias.float()
    if bias is not None and offsets is not bias:  # cast by a launch that the kernel would not wait for
        torch.cuda.current_stream(w_in.device).synchronize()
    tensors = (x, gains, w_in, offsets, y, select.thresholds, select.kept, table)
    source = nvrtc.Source("sparse_rows.cu", "thresholded", tuple(product.macros(c).items()))
    dynamic = product.dynamic_bytes(c, shared_memory(w_in)[0])
    shape = nvrtc.Shape(table.shape[0] * c.cluster, c.cluster, 32 * c.warps, dynamic)
    numbers = (eps, ctypes.c_float), (2 * w_in.shape[1], ctypes.c_longlong), (2 * outputs, ctypes.c_longlong)
    return nvrtc.bind(source, shape, tensors, numbers)


def _chosen(product: Product, segments: tuple[int, ...], w_in: torch.Tensor) -> Config:
    return config(segments, product.depth, product.normed and product.parts == 1, multiprocessors(w_in))
