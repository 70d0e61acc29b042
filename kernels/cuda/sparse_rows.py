"""Thresholded product in CUDA C++ for compute capability 9.0 and later: kept rows streamed by asynchronous copies.

Triton offers neither clusters with distributed shared memory nor copies that only the asking thread waits for; both
decide here. A cluster of two blocks owns a tile of columns, one block on every multiprocessor: a multiprocessor reads
at most 48 GB/s from L2 and 34 are its share of the memory's bandwidth, so two blocks on one are slower than two on
two, and clusters of more than two leave multiprocessors without a block. Sums are added in a fixed order: the same
bits every time. `sparse_rows.cu` holds the kernel; NVRTC, which comes with torch's CUDA build, compiles it when a
launch is bound. What it does not take (float32, odd shapes, older GPUs, no NVRTC) runs in Triton
(`sparse_gemv.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.cuda.common import SHARED_MEMORY_PERCENT, column_tiles, multiprocessors, overlaps, power_of_two
from kernels.norm import Norm
from kernels.selection import Selection

SOURCE = Path(__file__).with_suffix(".cu")
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
    if not overlaps(w_in) or w_in.dtype not in (torch.float16, torch.bfloat16) or missing():
        return False
    read = (x, w_in) if norm is None else (x, w_in, norm.weight)
    if any(n % 8 for n in (*segments, *w_in.shape)) or any(tensor.data_ptr() % 16 for tensor in read):
        return False
    product = Product(w_in.shape[0], 2 if paired else 1, False, norm is not None, False, False)
    return product.shared_bytes(_chosen(product, segments, w_in)) <= MOST_SHARED_BYTES


@cache
def missing() -> str:
    """Return what is missing to compile and launch the kernel, or nothing."""
    try:
        _bindings("nvrtc").nvrtcVersion()
        _bindings("driver").cuDriverGetVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
    gains, eps = (norm.weight, norm.eps) if norm is not None else (x, 0.0)
    offsets = y if bias is None else bias.float()
    tensors = (x, gains, w_in, offsets, y, select.thresholds, select.kept, table)
    values = (*(tensor.data_ptr() for tensor in tensors), eps, 2 * w_in.stride(0), 2 * outputs)
    types = (ctypes.c_void_p,) * len(tensors) + (ctypes.c_float, ctypes.c_longlong, ctypes.c_longlong)
    driver, function = _bindings("driver"), _function(product, c, w_in.device.index)
    launch_config = _launch_config(table.shape[0] * c.cluster, c, product.shared_bytes(c))

    def launch(alive: tuple[torch.Tensor, ...] = tensors) -> object:
        launch_config.hStream = driver.CUstream(torch.cuda.current_stream(w_in.device).cuda_stream)
        return _done(driver.cuLaunchKernelEx(launch_config, function, (values, types), 0))

    return launch


def _chosen(product: Product, segments: tuple[int, ...], w_in: torch.Tensor) -> Config:
    return config(segments, product.depth, product.normed and product.parts == 1, multiprocessors(w_in))


def _bindings(name: str) -> Any:
    return importlib.import_module(f"cuda.bindings.{name}")


def _done(result: tuple[Any, ...]) -> Any:
    """Return what a driver or NVRTC call returned after its status. Raises RuntimeError for a status other than 0."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"the sparse product cannot run: {status.name}")
    return values[0] if len(values) == 1 else values


def _launch_config(blocks: int, c: Config, shared_bytes: int) -> Any:
    driver = _bindings("driver")
    kinds = driver.CUlaunchAttributeID
    overlap, cluster = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = c.cluster, 1, 1
    found = driver.CUlaunchConfig()
    found.gridDimX, found.gridDimY, found.gridDimZ = blocks, 1, 1
    found.blockDimX, found.blockDimY, found.blockDimZ = 32 * c.warps, 1, 1
    found.sharedMemBytes, found.attrs, found.numAttrs = shared_bytes, [overlap, cluster], 2
    return found


@cache
def _function(product: Product, c: Config, device: int) -> Any:
    """Compile (or take from the cache of compiled kernels) and load for one device."""
    driver = _bindings("driver")
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the device's context current
        function = _done(
            driver.cuModuleGetFunction(
                _done(driver.cuModuleLoadData(_cubin(product, c, f"sm_{major}{minor}"))), b"thresholded"
            )
        )
        attributes = driver.CUfunction_attribute
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, product.shared_bytes(c)),
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, SHARED_MEMORY_PERCENT),
        ):
            _done(driver.cuFuncSetAttribute(function, attribute, value))
    return function


def _cubin(product: Product, c: Config, architecture: str) -> bytes:
    from triton.runtime.cache import get_cache_manager

    nvrtc = _bindings("nvrtc")
    source = SOURCE.read_bytes()
    options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17"]
    options += [f"-D{name}={value}".encode() for name, value in product.macros(c).items()]
    version = _done(nvrtc.nvrtcVersion())
    key = hashlib.sha256(b"\0".join((source, *options, repr(version).encode()))).hexdigest()
    manager = get_cache_manager(key)
    kept = manager.get_file("sparse_rows.cubin")
    if kept is not None:
        return Path(kept).read_bytes()
    program = _done(nvrtc.nvrtcCreateProgram(source, b"sparse_rows.cu", 0, [], []))
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status[0]):
        log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"sparse_rows.cu does not compile for {product}, {c}:\n{log.decode(errors='replace')}")
    cubin = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
    _done(nvrtc.nvrtcGetCUBIN(program, cubin))
    manager.put(cubin, "sparse_rows.cubin", binary=True)
    return cubin
