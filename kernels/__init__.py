"""The operations of one decode step, each in three rooms with one stem.

`kernels/<op>.py` states the formula and the bytes moved, holds the torch reference and the public `bind`;
`kernels/cpu/<op>.py` is Numba, `kernels/cuda/<op>.py` is Triton and hands what CUDA C++ runs faster to a file beside
it. Importing one backend never needs the other. Kernels know tensors, not models.

Three operations take over their neighbours, so that a layer is five launches:

    norm=Norm(weight, eps)   gemv, sparse_gemv, gate_up: x is the residual stream, normed while it is read
    accumulate=True          gemv, sparse_gemv: y += W x, the residual addition
    attention.bind_step      q/k norm, rotation and append ride on attention

`bind(...)` takes preallocated tensors, does every check and launch choice once, and returns a `Launch`, a callable
without arguments. A decode step is a list of launches. Whatever changes from step to step (position, lengths, tokens)
is read from small integer tensors, so the same list serves every step and can be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from kernels import identity

if TYPE_CHECKING:
    import torch

__version__ = identity.VERSION
identity.claim_name()

Launch = Callable[[], object]


class ShapeError(ValueError):
    """A tensor whose shape or dtype the operation is not defined for; the message names the tensor and what was
    expected.
    """


def in_order(launches: Sequence[Launch]) -> Launch:
    """Return one launch that makes these one after the other."""
    if len(launches) == 1:
        return launches[0]

    def run() -> None:
        for launch in launches:
            launch()

    return run


def backend(op: str, tensor: torch.Tensor) -> ModuleType:
    """Return the module that implements `op` where `tensor` lives: Numba for the CPU, Triton and CUDA C++ for CUDA."""
    room = "cuda" if tensor.is_cuda else "cpu"
    return importlib.import_module(f"kernels.{room}.{op}")


def require_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise ShapeError unless `tensor` has exactly the `expected` shape and is contiguous."""
    if tuple(tensor.shape) != expected:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    if not tensor.is_contiguous():
        raise ShapeError(f"{name} of shape {tuple(tensor.shape)} must be contiguous")
