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
from kernels.cuda.common import column_tiles, multiprocessors, norm_arguments, power_of_two
from kernels.norm import Norm
from kernels.selection import Selection

WHOLE_SM_BYTES = 105_000  # over half of what a multiprocessor lends: no second block of the kernel joins the first
MOST_SHARED_BYTES = 220_000  # of 227 KB a block may have, some are static
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

    def shared_bytes(self, c: Config) -> int:
        """Return the dynamic shared memory of a block: the rings of its warps and the list of its kept rows."""
        m = self.macros(c)
        ring = c.warps * c.depth * c.rows * max(512, 2 * m["COLUMNS"])
        dealt = math.ceil(self.depth / c.cluster) if m["SLICE"] == self.depth else m["SLICE"]
        return max(WHOLE_SM_BYTES, ring + self.parts * dealt * 8)


def takes(x: torch.Tensor, w_in: torch.Tensor, segments: tuple[int, ...], norm: Norm | None, paired: bool) -> bool:
    """Whether this kernel runs the product of x (K,) and w_in (K, N) here: else Triton does."""
    if nvrtc.refusal(w_in):
        return False
    read = (x, w_in) if norm is None else (x, w_in, norm.weight)
    if any(n % 8 for n in (*segments, *w_in.shape)) or any(tensor.data_ptr() % 16 for tensor in read):
        return False
    product = Product(w_in.shape[0], 2 if paired else 1, False, norm is not None, False, False)
    return product.shared_bytes(_chosen(product, segments, w_in)) <= MOST_SHARED_BYTES


def bind(
    x: torch.Tensor, w_in: torch.Tensor, y: torch.Tensor, select: Selection, bias: torch.Tensor | None,
    norm: Norm | None, accumulate: bool, paired: bool, chosen: Config | None = None,
) -> Callable[[], object]:  # fmt: skip
    """Bind the product; arguments as in `sparse_gemv.bind_thresholded`."""
    depth, outputs = w_in.shape[0], y.shape[0]
    segments = (0, outputs) if paired else select.segments
    bfloat = w_in.dtype == torch.bfloat16
    product = Product(depth, 2 if paired else 1, bfloat, norm is not None, bias is not None, accumulate)
    c = chosen or _chosen(product, segments, w_in)
    table = torch.tensor(column_tiles(segments, c.columns), dtype=torch.int32, device=w_in.device)
    gains, eps = norm_arguments(norm, x)
    offsets = y if bias is None else bias.float()
    tensors = (x, gains, w_in, offsets, y, select.thresholds, select.kept, table)
    source = nvrtc.Source("sparse_rows.cu", "thresholded", tuple(product.macros(c).items()))
    shape = nvrtc.Shape(table.shape[0] * c.cluster, c.cluster, 32 * c.warps, product.shared_bytes(c))
    numbers = (eps, ctypes.c_float), (2 * w_in.stride(0), ctypes.c_longlong), (2 * outputs, ctypes.c_longlong)
    return nvrtc.bind(source, shape, tensors, numbers)


def _chosen(product: Product, segments: tuple[int, ...], w_in: torch.Tensor) -> Config:
    return config(segments, product.depth, product.normed and product.parts == 1, multiprocessors(w_in))
