"""The sequences of a timed batch: one full cache per sequence, which modes and contexts of a group share, and what a
KV method keeps of it, per sequence as well.

No two sequences read the same memory: a layer's cache that one had just read would be served to the next from the
last-level cache. Two modes of a group may, because a whole step of weights lies between them.
"""

from __future__ import annotations

import torch

from artifact.engine.batch import Member
from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.prepare import Prepared, grid
from artifact.kv.catekv import CateKV, identify
from artifact.kv.snapkv import SnapKV

PARTS = 32  # of a tensor that is changed in place


def lanes(prepared: Prepared, batch: int, capacity: int, own: bool = False) -> list[KVCache]:
    """One full cache of `capacity` tokens per sequence; the first is that of the prefill where it is large enough and
    may be written to (own False).
    """
    source = prepared.cache
    tokens = min(capacity, source.tokens)
    lent = source.capacity >= capacity and not own
    made = [source.share(tokens) if lent else source.fork(tokens, capacity)]
    for number in range(1, batch):
        made.append(source.fork(tokens, capacity))
        _turn(prepared, made[-1].values, number)
    return made


def snapkv(prepared: Prepared, lanes: list[KVCache], context: int, r_kv: float, room: int) -> list[Member]:
    """Sequences of `context` tokens that go on differently; at r_kv below 1 each reads a selection of its own."""
    packed: list[PackedCache | None] = [None] * len(lanes)
    if r_kv < 1:
        queries = prepared.queries[grid(context)]
        first = SnapKV().select(lanes[0].share(context), queries, r_kv, prepared.scale(), room)
        copies = [first.fork() for _ in lanes[1:]]
        for number, copy in enumerate(copies, 1):
            _turn(prepared, copy.values, number)
        packed = [first, *copies]
    return [
        Member(lane.share(context), passage(prepared, context, number, room), packed[number])
        for number, lane in enumerate(lanes)
    ]


def catekv(
    prepared: Prepared, batch: int, context: int, method: CateKV, adaptive_share: float, room: int
) -> list[Member]:
    """Sequences that hold what CateKV keeps of `context` tokens and nothing else, in ragged storage of their own.

    Head types are those of the prompt itself: they decide which heads are long, and time depends on how many are.
    """
    source, queries, scale = prepared.cache.share(context), prepared.queries[grid(context)], prepared.scale()
    adaptive = identify(method.scores(source, queries, scale)[None], adaptive_share)
    kept = [method.select(source, queries, adaptive, scale, room)]
    for number in range(1, batch):
        kept.append(kept[0].fork())
        _turn(prepared, kept[-1].values, number)
    return [Member(source.released(), passage(prepared, context, number, room), own) for number, own in enumerate(kept)]


def passage(prepared: Prepared, context: int, number: int, room: int) -> torch.Tensor:
    """The prompt, and the passage behind the longest prefill that sequence `number` goes on with."""
    tail = prepared.tokens[prepared.cache.tokens :]
    return torch.cat((prepared.tokens[:context], tail[number * room : number * room + room + 1]))


def _turn(prepared: Prepared, values: torch.Tensor, number: int) -> None:
    """Rotate the channels of synthetic values by `number`: what a step reads stays the same, and a step that mixes
    its sequences up shows in its numbers. Sequences on real text differ by what they go on with.
    """
    if prepared.synthetic:
        for part in values.split(-(-values.shape[0] // PARTS)):
            part.copy_(part.roll(number, -1))
