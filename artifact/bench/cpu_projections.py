"""Benchmark lines of the projections on a CPU: each fused shape, and the projections of a whole step.

The targets hold for a step's projections together. A single shape may be a few hundred KB a layer, where starting the
threads, selecting and the first misses of a launch are a fifth of its time; the lines per shape show it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from artifact.bench.cpu_lines import Bench, Line
from artifact.engine.models import Layer, Matrix, Weights
from artifact.shapes import Shape
from kernels import Launch, gate_up, gemv, in_order, sparse_gemv
from kernels.selection import Selection

KEEP = 0.5
TARGET = 0.85  # of the read bandwidth
SITES: dict[str, Callable[[Layer], Matrix]] = {
    "qkv": lambda layer: layer.qkv,
    "o": lambda layer: layer.o,
    "gate_up": lambda layer: layer.gate_up,
    "down": lambda layer: layer.down,
}


@dataclass(frozen=True)
class Site:
    """One fused projection of every layer: launches of both forms and of torch, and what the sparse form reads."""

    dense: list[Launch]
    sparse: list[Launch]
    peer: list[Launch]
    matrices: list[Matrix]
    selections: list[Selection]

    def dense_bytes(self) -> float:
        return float(sum(gemv.bytes_moved(m.w) for m in self.matrices))

    def sparse_bytes(self) -> float:
        pairs = zip(self.matrices, self.selections, strict=True)
        return float(sum(sparse_gemv.bytes_moved(m.w_in, s) for m, s in pairs))


def projection_lines(bench: Bench, weights: Weights) -> Iterator[Line]:
    """Dense and sparse lines of the four fused projections over all layers, then of all of them in a step's order."""
    sites = {name: _site(name, [of(layer) for layer in weights.layers], weights.shape) for name, of in SITES.items()}
    for name, one in sites.items():
        yield bench.line(f"dense {name}", None, in_order(one.dense), one.dense_bytes, ("torch.mv", in_order(one.peer)))
        yield bench.line(f"sparse {name} at {KEEP:.0%}", None, in_order(one.sparse), one.sparse_bytes)
    every = list(sites.values())

    def turned(form: Callable[[Site], list[Launch]]) -> Launch:
        return in_order(list(itertools.chain.from_iterable(zip(*map(form, every), strict=True))))

    def total(size: Callable[[Site], float]) -> Callable[[], float]:
        return lambda: sum(map(size, every))

    peer = ("torch.mv", turned(lambda site: site.peer))
    dense, sparse = turned(lambda site: site.dense), turned(lambda site: site.sparse)
    yield bench.line("dense projections", TARGET, dense, total(Site.dense_bytes), peer)
    yield bench.line(f"sparse projections at {KEEP:.0%}", TARGET, sparse, total(Site.sparse_bytes))


def _site(name: str, matrices: list[Matrix], shape: Shape) -> Site:
    outputs, inputs = matrices[0].w.shape
    segments = (0, shape.intermediate, 2 * shape.intermediate) if name == "gate_up" else (0, outputs)
    x, y, act = torch.randn(inputs), torch.empty(outputs), torch.empty(shape.intermediate)
    threshold = torch.full((len(segments) - 1,), float(x.abs().quantile(1 - KEEP)))
    selections = [Selection(threshold, segments, torch.zeros(len(segments) - 1, dtype=torch.int32)) for _ in matrices]
    if name == "gate_up":
        dense = [gate_up.bind(x, m.w, act) for m in matrices]
        sparse = [gate_up.bind_sparse(x, m.w_in, act, s) for m, s in zip(matrices, selections, strict=True)]
    else:
        dense = [gemv.bind(x, m.w, y) for m in matrices]
        sparse = [sparse_gemv.bind(x, m.w_in, y, s) for m, s in zip(matrices, selections, strict=True)]
    peer: list[Launch] = [functools.partial(torch.mv, m.w, x, out=y) for m in matrices]
    return Site(dense, sparse, peer, matrices, selections)
