"""What a decode step is made of: launches with a name, and the vectors they hand on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact.shapes import Shape
from kernels import Launch, in_order


@dataclass(frozen=True)
class Op:
    """One launch of a step; `name` is the kind of operation, for the time and bandwidth of each kind."""

    name: str
    launch: Launch


def captured(launches: Sequence[Launch]) -> Launch:
    """The replay of a CUDA graph of these launches; each has run before, so that everything is compiled."""
    graph, run = torch.cuda.CUDAGraph(), in_order(launches)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@dataclass(frozen=True)
class Buffers:
    """Activation vectors of one decoder, float32; `query` is written only where rotation is a launch of its own."""

    residual: torch.Tensor
    qkv: torch.Tensor
    query: torch.Tensor
    mixed: torch.Tensor
    act: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def allocate(cls, shape: Shape, device: torch.device) -> Buffers:
        """Vectors for a model of this shape, zeroed."""
        q_width = shape.heads * shape.head_dim

        def vector(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        return cls(
            residual=vector(shape.hidden),
            qkv=vector(q_width + 2 * shape.kv_heads * shape.head_dim),
            query=vector(q_width).view(shape.heads, shape.head_dim),
            mixed=vector(q_width),
            act=vector(shape.intermediate),
            logits=vector(shape.vocab),
        )
