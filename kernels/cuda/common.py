"""What the GPU kernels share, in Triton and in CUDA C++: overlap with the predecessor, the last arrival of a group of
programs, workspaces, what a device has, norms, tiles.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.norm import Norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_TILE_COUNTERS = 1 << 16
SHARED_MEMORY_PERCENT = 72  # one split for all kernels (H200): at 87 a dense step takes 10% more, at 40 a sparse one 4%

_workspaces: dict[tuple[str, torch.device], torch.Tensor] = {}


@triton.jit
def wait_for_producer(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait until the previous one is complete and its writes are visible."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def arrives_last(counter, expected):
    """Return whether this program is the last of `expected` to arrive; the counter is left at zero for the next
    launch.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def inverse_rms(x, eps, K: tl.constexpr, SPAN: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of the K floats at x, read at once; SPAN is a power of two >= K."""
    k = tl.arange(0, SPAN)
    value = tl.load(x + k, mask=k < K, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / K + eps)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether launches on this tensor's device may start before their predecessor ends (compute capability >=
    9.0).
    """
    return tensor.is_cuda and not INTERPRETED and _capability(tensor.device.index)[0] >= 9


def multiprocessors(tensor: torch.Tensor) -> int:
    """Return the multiprocessor count of the tensor's device; 4 under the interpreter, to exercise splitting on
    small shapes.
    """
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 4


def shared_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the shared memory, in bytes, of a multiprocessor of the tensor's device and the most that a block may
    have; those of compute capability 9.0 without a GPU.
    """
    if not tensor.is_cuda:
        return 228 << 10, 227 << 10
    device = torch.cuda.get_device_properties(tensor.device)
    most = getattr(device, "shared_memory_per_block_optin", device.shared_memory_per_block)
    return device.shared_memory_per_multiprocessor, most


def norm_arguments(norm: Norm | None, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return what a kernel takes for a norm: weight and eps; x, which stands in unread, and 0 without one."""
    return (x, 0.0) if norm is None else (norm.weight, norm.eps)


def workspace(name: str, tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a shared float32 buffer of at least `elements` on the tensor's device; contents last only within one
    launch.
    """
    key = (name, tensor.device)
    if key not in _workspaces or _workspaces[key].numel() < elements:
        _workspaces[key] = torch.empty(elements, dtype=torch.float32, device=tensor.device)
    return _workspaces[key]


def counters(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shared arrival counters of the tensor's device: int32, all zero between launches."""
    key = ("arrivals", tensor.device)
    if key not in _workspaces:
        _workspaces[key] = torch.zeros(MAX_TILE_COUNTERS, dtype=torch.int32, device=tensor.device)
    return _workspaces[key]


def launcher(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    warps: int,
    stages: int = 2,
    registers: int = 0,
) -> Callable[[], object]:
    """Return a callable that launches `kernel` with everything fixed; OVERLAP in `constants` also sets the launch
    attribute.

    `registers` bounds the registers per thread, for more resident programs; 0 leaves them to the compiler.
    """
    options: dict[str, Any] = {}
    if not INTERPRETED:
        options = {"launch_pdl": bool(constants.get("OVERLAP", False)), "num_stages": stages}
        options |= {"maxnreg": registers} if registers else {}
    bound = kernel[grid]
    pending = [not INTERPRETED]

    def launch() -> object:
        compiled = bound(*arguments, **constants, num_warps=warps, **options)
        if pending[0]:
            _prefer_shared_memory(compiled.function)
            pending[0] = False
        return compiled

    return launch


def _prefer_shared_memory(function: int) -> None:
    """Give a loaded kernel the common split of L1 and shared memory; a multiprocessor must drain before the split
    can change.
    """
    preferred = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    status = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), preferred, SHARED_MEMORY_PERCENT)
    if status:
        raise RuntimeError(
            f"the CUDA driver refused a shared-memory preference of {SHARED_MEMORY_PERCENT}%: status {status}"
        )


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def column_tiles(segments: tuple[int, ...], width: int) -> list[tuple[int, int, int, int]]:
    """Return (first column, end, segment, 1 for the tile that counts its segment) of every tile of `width` columns."""
    return [
        (start, min(start + width, high), s, int(start == low))
        for s, (low, high) in enumerate(itertools.pairwise(segments))
        for start in range(low, high, width)
    ]


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
