"""CUDA C++ kernels that Triton cannot express: compiled by NVRTC, which comes with torch's CUDA build, launched through
the driver. Compute capability 9.0 and later: all of them overlap with their neighbours.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.cuda.common import SHARED_MEMORY_PERCENT, overlaps

SHARED = "warp.cuh"  # what every source may include


@dataclass(frozen=True)
class Source:
    """A file beside this one, the function in it, and the macros that it is compiled with."""

    file: str
    function: str
    macros: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Shape:
    """Of a launch: blocks, those of a cluster, threads of a block, bytes of its dynamic shared memory."""

    blocks: int
    cluster: int
    threads: int
    shared_bytes: int = 0


@cache
def missing() -> str:
    """Return what is missing to compile and launch, or nothing."""
    try:
        _bindings("nvrtc").nvrtcVersion()
        _bindings("driver").cuDriverGetVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def runs(tensor: torch.Tensor) -> bool:
    """Whether these kernels run on the tensor's device and take its dtype."""
    return overlaps(tensor) and tensor.dtype in (torch.float16, torch.bfloat16) and not missing()


def bind(
    source: Source, shape: Shape, tensors: tuple[torch.Tensor, ...], numbers: tuple[tuple[float, Any], ...]
) -> Callable[[], object]:
    """Bind a launch: pointers of `tensors` first, then (value, ctypes type) of every number. RuntimeError when the
    source does not compile or the driver refuses the launch.
    """
    device = tensors[0].device
    values = (*(tensor.data_ptr() for tensor in tensors), *(value for value, _ in numbers))
    types = (ctypes.c_void_p,) * len(tensors) + tuple(kind for _, kind in numbers)
    driver, function, config = _bindings("driver"), _function(source, shape.shared_bytes, device.index), _config(shape)

    def launch(alive: tuple[torch.Tensor, ...] = tensors) -> object:
        config.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        return _done(driver.cuLaunchKernelEx(config, function, (values, types), 0))

    return launch


def _bindings(name: str) -> Any:
    return importlib.import_module(f"cuda.bindings.{name}")


def _done(result: tuple[Any, ...]) -> Any:
    """Return what a driver or NVRTC call returned after its status. Raises RuntimeError for a status other than 0."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"a CUDA C++ kernel cannot run: {status.name}")
    return values[0] if len(values) == 1 else values


def _config(shape: Shape) -> Any:
    driver = _bindings("driver")
    kinds = driver.CUlaunchAttributeID
    overlap, cluster = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = shape.cluster, 1, 1
    found = driver.CUlaunchConfig()
    found.gridDimX, found.gridDimY, found.gridDimZ = shape.blocks, 1, 1
    found.blockDimX, found.blockDimY, found.blockDimZ = shape.threads, 1, 1
    found.sharedMemBytes, found.attrs, found.numAttrs = shape.shared_bytes, [overlap, cluster], 2
    return found


@cache
def _function(source: Source, shared_bytes: int, device: int) -> Any:
    """Compile (or take from the cache of compiled kernels) and load for one device."""
    driver = _bindings("driver")
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the device's context current
        module = _done(driver.cuModuleLoadData(_cubin(source, f"sm_{major}{minor}")))
        function = _done(driver.cuModuleGetFunction(module, source.function.encode()))
        attributes = driver.CUfunction_attribute
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, SHARED_MEMORY_PERCENT),
        ):
            _done(driver.cuFuncSetAttribute(function, attribute, value))
    return function


def _cubin(source: Source, architecture: str) -> bytes:
    from triton.runtime.cache import get_cache_manager

    nvrtc = _bindings("nvrtc")
    text, shared = (Path(__file__).with_name(name).read_bytes() for name in (source.file, SHARED))
    options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17"]
    options += [f"-D{name}={value}".encode() for name, value in source.macros]
    version = _done(nvrtc.nvrtcVersion())
    key = hashlib.sha256(b"\0".join((text, shared, *options, repr(version).encode()))).hexdigest()
    manager, name = get_cache_manager(key), f"{source.function}.cubin"
    kept = manager.get_file(name)
    if kept is not None:
        return Path(kept).read_bytes()
    program = _done(nvrtc.nvrtcCreateProgram(text, source.file.encode(), 1, [shared], [SHARED.encode()]))
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status[0]):
        log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source} does not compile:\n{log.decode(errors='replace')}")
    cubin = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
    _done(nvrtc.nvrtcGetCUBIN(program, cubin))
    manager.put(cubin, name, binary=True)
    return cubin
