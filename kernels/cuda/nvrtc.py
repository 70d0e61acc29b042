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
NEXT_STEP = "`artifact doctor` says what this GPU can run; without the package cuda-bindings all runs in Triton"


@dataclass(frozen=True)
class Source:
    """A file beside this one, the function in it, and the macros that it is compiled with."""

    file: str
    function: str
    macros: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.function} of {self.file} ({' '.join(f'{name}={value}' for name, value in self.macros)})"


@dataclass(frozen=True)
class Shape:
    """Of a launch: blocks, those of a cluster, threads of a block, bytes of its dynamic shared memory."""

    blocks: int
    cluster: int
    threads: int
    shared_bytes: int = 0


@cache
def missing(device: int) -> str:
    """Return what is missing to compile for a CUDA device and launch there, or nothing."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"compute capability {major}.{minor}, 9.0 is needed"
    try:
        known = _done(_bindings("nvrtc").nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
        _done(_bindings("driver").cuDriverGetVersion(), "cuDriverGetVersion")
    except (ImportError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    if 10 * major + minor not in known:
        return f"this NVRTC compiles for compute capability {max(known) / 10} at most, not for {major}.{minor}"
    return ""


def refusal(tensor: torch.Tensor) -> str:
    """Return why these kernels do not run on the tensor's device or not take its dtype, or nothing."""
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return f"weights are {tensor.dtype}, not float16 or bfloat16"
    if not overlaps(tensor):
        return f"weights lie on {tensor.device}, not on a GPU of compute capability 9.0 or later"
    return missing(tensor.device.index)


def bind(
    source: Source, shape: Shape, tensors: tuple[torch.Tensor, ...], numbers: tuple[tuple[float, Any], ...]
) -> Callable[[], object]:
    """Bind a launch: pointers of `tensors` first, then (value, ctypes type) of every number. RuntimeError when another
    device than the tensors' is current, the source does not compile, or the driver refuses the launch.
    """
    device, current = tensors[0].device, torch.cuda.current_device()
    elsewhere = [tensor.device for tensor in tensors if tensor.device.index != current]
    if elsewhere:
        raise RuntimeError(
            f"{source}: a tensor lies on {elsewhere[0]} while cuda:{current} is current; put all on one GPU, and "
            "bind and launch under torch.cuda.device of it"
        )
    values = (*(tensor.data_ptr() for tensor in tensors), *(value for value, _ in numbers))
    types = (ctypes.c_void_p,) * len(tensors) + tuple(kind for _, kind in numbers)
    driver, function, config = _bindings("driver"), _function(source, shape.shared_bytes, device.index), _config(shape)
    call = f"cuLaunchKernelEx of {source} as {shape}"

    def launch(alive: tuple[torch.Tensor, ...] = tensors) -> object:
        config.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        return _done(driver.cuLaunchKernelEx(config, function, (values, types), 0), call)

    return launch


def _bindings(name: str) -> Any:
    return importlib.import_module(f"cuda.bindings.{name}")


def _done(result: tuple[Any, ...], call: str) -> Any:
    """Return what a driver or NVRTC call returned after its status. Raises RuntimeError, naming the call, for a status
    other than 0.
    """
    status, *values = result
    if int(status):
        raise RuntimeError(f"{call}: {status.name}; {NEXT_STEP}")
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
    """Compile (or take from the cache of compiled kernels) and load for the current device."""
    driver = _bindings("driver")
    major, minor = torch.cuda.get_device_capability(device)
    torch.cuda.current_stream(device).synchronize()  # makes the device's context current
    module = _done(driver.cuModuleLoadData(_cubin(source, f"sm_{major}{minor}")), f"cuModuleLoadData of {source}")
    function = _done(driver.cuModuleGetFunction(module, source.function.encode()), f"cuModuleGetFunction of {source}")
    attributes = driver.CUfunction_attribute
    for attribute, value in (
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
        (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, SHARED_MEMORY_PERCENT),
    ):
        call = f"cuFuncSetAttribute {attribute.name} = {value} of {source}"
        _done(driver.cuFuncSetAttribute(function, attribute, value), call)
    return function


def _cubin(source: Source, architecture: str) -> bytes:
    """Return the compiled source, from the cache where it is there; RuntimeError, with NVRTC's log, otherwise."""
    from triton.runtime.cache import get_cache_manager

    text, shared = (Path(__file__).with_name(name).read_bytes() for name in (source.file, SHARED))
    options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17"]
    options += [f"-D{name}={value}".encode() for name, value in source.macros]
    version = _done(_bindings("nvrtc").nvrtcVersion(), "nvrtcVersion")
    key = hashlib.sha256(b"\0".join((text, shared, *options, repr(version).encode()))).hexdigest()
    manager, name = get_cache_manager(key), f"{source.function}.cubin"
    kept = manager.get_file(name)
    if kept is not None:
        return Path(kept).read_bytes()
    cubin = _compiled(source, text, shared, options)
    manager.put(cubin, name, binary=True)
    return cubin


def _compiled(source: Source, text: bytes, shared: bytes, options: list[bytes]) -> bytes:
    nvrtc = _bindings("nvrtc")
    created = nvrtc.nvrtcCreateProgram(text, source.file.encode(), 1, [shared], [SHARED.encode()])
    program = _done(created, f"nvrtcCreateProgram of {source}")
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status[0]):
            log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program), f"nvrtcGetProgramLogSize of {source}")
            nvrtc.nvrtcGetProgramLog(program, log)
            said = log.decode(errors="replace").strip("\0 \n")
            raise RuntimeError(f"nvrtcCompileProgram of {source}: {status[0].name}\n{said}\n{NEXT_STEP}")
        cubin = b" " * _done(nvrtc.nvrtcGetCUBINSize(program), f"nvrtcGetCUBINSize of {source}")
        _done(nvrtc.nvrtcGetCUBIN(program, cubin), f"nvrtcGetCUBIN of {source}")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)
