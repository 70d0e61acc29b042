"""Tensor parallelism of one decode step: the launches of `Decoder` on a slice of every projection, sums in between.

    qkv, gate|up   split by output: a rank holds whole heads and whole neurons, no sum is needed
    o, down        split by input:  every rank adds its part to the residual stream, the parts are summed
    head           split by vocabulary: the logits are gathered

So a step of L layers has 2 L all-reduces of H floats and one gather of V, and a rank reads its share of projections,
cache and head. The residual stream and the embedding are replicated. Sums go into the buffers that the launches were
bound to, which is why the collectives are the in-place ones. Any projection branch runs inside: a threshold belongs to
all channels of an input, and a rank compares those that it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from artifact.engine.cache import KVCache
from artifact.engine.decoder import Counted, Decoder
from artifact.engine.models import Layer, Matrix, Weights
from artifact.engine.step import Buffers, Op
from artifact.errors import UserError
from artifact.projection.branch import Counters, Projection, Routed, Rows, Steps
from artifact.projection.dense import Dense
from artifact.shapes import Shape
from kernels.memory import placed


@dataclass(frozen=True)
class Rank:
    """One of `size` processes of a group, from 0; the sums of a step run over the default group."""

    index: int
    size: int

    @classmethod
    def here(cls) -> Rank:
        """This process in the default group of torch.distributed."""
        return cls(dist.get_rank(), dist.get_world_size())


def local_shape(shape: Shape, size: int) -> Shape:
    """Dimensions of what one of `size` ranks holds. UserError where heads, neurons or vocabulary do not divide."""
    for name in ("heads", "kv_heads", "intermediate", "vocab"):
        if getattr(shape, name) % size:
            raise UserError(f"{shape.name}: {name} {getattr(shape, name)} does not divide over {size} ranks")
    parts = {name: getattr(shape, name) // size for name in ("heads", "kv_heads", "intermediate", "vocab")}
    return replace(shape, name=f"{shape.name} / {size}", **parts)


def shard(weights: Weights, rank: Rank) -> Weights:
    """The part of a whole model that one rank holds; the embedding stays whole."""
    shape, part = weights.shape, local_shape(weights.shape, rank.size)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def layer(one: Layer) -> Layer:
        return replace(
            one,
            qkv=_by_output(one.qkv, (q, kv, kv), rank),
            o=_by_input(one.o, rank),
            gate_up=_by_output(one.gate_up, (shape.intermediate, shape.intermediate), rank),
            down=_by_input(one.down, rank),
        )

    return replace(
        weights,
        shape=part,
        layers=tuple(layer(one) for one in weights.layers),
        head=_slice(weights.head, 0, rank).contiguous(),
        identity=f"{weights.identity} rank {rank.index} of {rank.size}",
    )


def shard_cache(cache: KVCache, rank: Rank) -> KVCache:
    """The KV heads of one rank, with counters of their own."""
    keys, values, lengths = (_slice(t, 1, rank).contiguous() for t in (cache.keys, cache.values, cache.lengths))
    return KVCache(keys, values, cache.position.clone(), lengths)


class ParallelDecoder:
    """One rank's part of a decoder: `step` must be called on every rank; `logits` (V,) is whole on each.

    `local` is this rank's decoder, with the counts of what this rank read. The KV heads of `cache` are this rank's own.
    """

    def __init__(
        self,
        weights: Weights,
        cache: KVCache,
        tokens: torch.Tensor,
        rank: Rank,
        projection: Projection | None = None,
        packed: Any = None,
    ) -> None:
        self.rank, self.weights = rank, weights
        self.local = Decoder(weights, cache, tokens, _Summed(projection or Dense(), rank), packed)
        self.logits = torch.empty(weights.shape.vocab * rank.size, dtype=torch.float32, device=weights.device)

    def step(self) -> None:
        """Decode one token on all ranks together."""
        self.local.step()
        dist.all_gather_into_tensor(self.logits, self.local.logits)

    def check_room(self, steps: int) -> None:
        """Raise UserError unless this rank's caches hold `steps` more tokens."""
        self.local.check_room(steps)

    def reset_counts(self) -> None:
        """Start counting anew from the current position."""
        self.local.reset_counts()

    def counted(self) -> Counted:
        """What this rank read per step; the ranks' bytes add up to those of one."""
        return self.local.counted()


@dataclass(frozen=True)
class _Summed:
    """A projection branch whose o and down are summed over ranks."""

    inner: Projection
    rank: Rank

    def bind(self, weights: Weights, buffers: Buffers) -> Steps:
        return _SummedSteps(self.inner.bind(weights, buffers), buffers, self.rank)

    def rows(self, weights: Weights) -> Rows:
        raise UserError("a model split over ranks is decoded step by step; score it on one rank")


class _SummedSteps:
    """Launches of the inner branch with a sum behind each launch that adds to the residual stream.

    Such a launch adds its part to what is there. What was there before must be counted once, so every rank but the
    first clears it ahead of the launch.
    """

    def __init__(self, inner: Steps, buffers: Buffers, rank: Rank) -> None:
        self.inner, self.buffers, self.rank = inner, buffers, rank

    @property
    def counters(self) -> Counters | None:
        return self.inner.counters

    @property
    def routed(self) -> Routed | None:
        found = self.inner.routed
        return None if found is None else Routed(found.table, _SummedSteps(found.base, self.buffers, self.rank))

    def qkv(self, index: int, layer: Layer) -> list[Op]:
        return self.inner.qkv(index, layer)

    def o(self, index: int, layer: Layer) -> list[Op]:
        return self._summed(self.inner.o(index, layer))

    def mlp(self, index: int, layer: Layer) -> list[Op]:
        return self._summed(self.inner.mlp(index, layer))

    def bytes_read(self, steps: int) -> float:
        return self.inner.bytes_read(steps)

    def _summed(self, ops: list[Op]) -> list[Op]:
        """The last of the launches is the one that adds to the residual stream; those before it still read it."""
        residual = self.buffers.residual
        clear = [] if self.rank.index == 0 else [Op("clear", residual.zero_)]
        return [*ops[:-1], *clear, ops[-1], Op("sum", _sum_into(residual))]


def _sum_into(vector: torch.Tensor) -> Callable[[], object]:
    return lambda: dist.all_reduce(vector)


def _slice(tensor: torch.Tensor, axis: int, rank: Rank) -> torch.Tensor:
    size = tensor.shape[axis] // rank.size
    return tensor.narrow(axis, rank.index * size, size)


def _by_output(matrix: Matrix, parts: tuple[int, ...], rank: Rank) -> Matrix:
    """This rank's rows of each fused part, biases with them."""
    w = torch.cat([_slice(part, 0, rank) for part in matrix.w.split(parts)])
    bias = None if matrix.bias is None else torch.cat([_slice(part, 0, rank) for part in matrix.bias.split(parts)])
    return Matrix(w, bias)


def _by_input(matrix: Matrix, rank: Rank) -> Matrix:
    """This rank's input channels; the bias is added once, by the first rank."""
    w = placed(_slice(matrix.w, 1, rank))
    return Matrix(w, matrix.bias if rank.index == 0 else None)
