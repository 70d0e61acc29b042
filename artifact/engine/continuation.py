"""Greedy continuations of several prompts, decoded together: a step reads every weight once for all of them.

Sequences that read the same projections and either all have a KV branch or have none share a batch; each attends to a
cache of its own, so what is generated is what it would have been alone (`tests/test_continuation.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact.engine import teacher
from artifact.engine.batch import BatchDecoder, Member
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.kv.branch import KVBranch
from artifact.projection.thresholds import Thresholds
from kernels.batched_gemv import MOST


@dataclass(frozen=True)
class Prompt:
    """tokens (n,) int64, of which `cache` holds at most n - 1; packed: what a KV method retained of the cache.

    What is read and decoded is appended to the cache. Prompts of one call may share its storage, with counters of
    their own (`KVCache.share`), where all have a KV branch, so that none reads it.
    """

    tokens: torch.Tensor
    cache: KVCache
    packed: KVBranch | None = None


@dataclass(frozen=True)
class Continuation:
    """generated: token ids, fewer than asked for where the model's window ended; r_p: counted share of the projection
    bytes that a sequence of the batch read, 1 when nothing was decoded.
    """

    generated: list[int]
    r_p: float


@torch.inference_mode()
def continued(
    weights: Weights, prompts: Sequence[Prompt], steps: int, thresholds: Thresholds | None
) -> list[Continuation]:
    """Read the rest of every prompt but its last token in one pass, then decode up to `steps` tokens from that one."""
    taken = [max(0, min(steps, _room(weights, one))) for one in prompts]
    for one in prompts:
        if len(rest := one.tokens[one.cache.tokens : -1]):
            teacher.extend(weights, one.cache, rest.to(weights.device), 0, thresholds, one.packed)
    found = [Continuation([], 1.0)] * len(prompts)
    for count in sorted(set(taken) - {0}):
        same = [i for i, own in enumerate(taken) if own == count]
        for first in range(0, len(same), MOST):
            batch = same[first : first + MOST]
            for i, own in zip(batch, _decoded(weights, [prompts[i] for i in batch], count, thresholds), strict=True):
                found[i] = own
            gc.collect()  # decoders refer to themselves, and hold what was retained of every prompt
    return found


def _room(weights: Weights, prompt: Prompt) -> int:
    """Tokens that the model's window and the full cache, where one is kept, leave behind a prompt."""
    window = weights.shape.window
    return (min(window, prompt.cache.capacity) if prompt.cache.stored else window) - int(prompt.tokens.shape[0])


def _decoded(
    weights: Weights, prompts: Sequence[Prompt], steps: int, thresholds: Thresholds | None
) -> list[Continuation]:
    members = []
    for one in prompts:
        buffer = torch.zeros(len(one.tokens) + steps + 1, dtype=torch.int64, device=weights.device)
        buffer[: len(one.tokens)] = one.tokens
        members.append(Member(one.cache, buffer, one.packed))
    decoder: Decoder | BatchDecoder
    if len(members) == 1:
        alone = members[0]
        decoder = Decoder(weights, alone.cache, alone.tokens, thresholds, alone.packed, greedy=True)
    else:
        decoder = BatchDecoder(weights, members, thresholds, greedy=True)
    decoder.check_room(steps)
    for _ in range(steps):
        decoder.step()
    r_p = decoder.counted().r_p
    starts = [len(one.tokens) for one in prompts]
    return [Continuation(m.tokens[at : at + steps].tolist(), r_p) for m, at in zip(members, starts, strict=True)]
