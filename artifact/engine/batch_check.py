"""The numeric check of a batched step: layer by layer against its sequences decoded alone, on equal inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from artifact.engine.batch import BatchDecoder
from artifact.engine.cache import PackedCache
from artifact.engine.decoder import Decoder
from artifact.engine.ragged import RaggedCache
from artifact.engine.step import Op
from artifact.kv.branch import KVBranch
from kernels import Launch

# What a layer adds, batched against alone on the same input: rounding, of which a half-precision cache takes five units
# (artifact.engine.reference); and a channel within rounding of a threshold, which carries a few percent, may fall on
# the other side. A wrong row, mask or cache differs by about one.
DENSE_TOLERANCE, ROUNDINGS, SPARSE_TOLERANCE = 1e-3, 5.0, 0.15


def check_step(decoder: BatchDecoder) -> float:
    """Take one step layer by layer, each sequence beside itself alone on the same input; return the largest relative
    difference of what a layer adds, or of the logits.

    Layers start from equal inputs, because a thresholded channel that falls on the other side of its threshold moves
    the logits of thirty layers by a tenth. Raises RuntimeError when a difference exceeds rounding.
    """
    alone: list[Decoder] = []
    for one in decoder.sequences:
        tokens = one.cache.tokens
        cache = one.cache.fork(tokens, tokens + 1) if one.cache.stored else one.cache.released()
        alone.append(Decoder(decoder.weights, cache, one.tokens, decoder.thresholds, _copied(one.packed)))
    limit = max(DENSE_TOLERANCE, ROUNDINGS * torch.finfo(decoder.weights.embedding.dtype).eps)
    limit = limit if decoder.thresholds is None else max(limit, SPARSE_TOLERANCE)
    own = [_by_layer(single.ops, [op.launch for op in single.ops]) for single in alone]
    worst = 0.0
    for index, launches in enumerate(_by_layer(decoder.ops, decoder._launches)):
        before = decoder.residual.clone()
        for single, residual in zip(alone, before, strict=True):
            single.buffers.residual.copy_(residual)
        for launch in launches:
            launch()
        for number, single in enumerate(alone):
            for launch in own[number][index]:
                launch()
            last = index == len(own[number]) - 1
            batched, wanted = (
                (decoder.logits[number], single.logits)
                if last
                else (decoder.residual[number] - before[number], single.buffers.residual - before[number])
            )
            difference = float((batched - wanted).norm() / wanted.norm())
            worst = max(worst, difference) if difference == difference else difference
            if not worst <= limit:
                what = "logits" if last else f"what layer {index} adds"
                raise RuntimeError(f"batched, {what} differs from that of the sequence alone by {worst:.1e}")
    return worst


def _by_layer(ops: Sequence[Op], launches: Sequence[Launch]) -> list[list[Launch]]:
    """Launches of a step, cut behind the down projection of each layer; the first part embeds, too."""
    parts: list[list[Launch]] = [[]]
    for op, launch in zip(ops, launches, strict=True):
        parts[-1].append(launch)
        if op.name == "down":
            parts.append([])
    return parts


def _copied(branch: KVBranch | None) -> KVBranch | None:
    """The same entries in storage of their own."""
    if branch is None or isinstance(branch, PackedCache | RaggedCache):
        return branch and branch.fork()
    raise TypeError(f"a batch of {type(branch).__name__} has no copy to be checked against")
