"""Timing of decode steps: warm-up, modes interleaved step by step, synchronised clocks, raw samples.

Interleaving makes slow drift and other load fall on all modes alike. Every round is in an order of its own: what a
last-level cache still holds depends on the step before, and a fixed cyclic order, rotated or not, would give each mode
the same predecessor in every round. Samples are returned as measured, each with the turn it was taken in; statistics
are taken elsewhere.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights

Clock = Callable[[], int]
QUEUEING_CYCLES = 60_000_000  # about 30 ms, longer than the host needs for the launches of a step


class Stepping(Protocol):
    """What can be timed step by step: a decoder of one sequence or of a batch."""

    weights: Weights

    def step(self) -> None: ...

    def check_room(self, steps: int) -> None: ...

    def reset_counts(self) -> None: ...


@dataclass(frozen=True)
class Samples:
    """Of one member of a group: ms of its timed steps, and the turns of the group, counted from 0, that they took."""

    ms: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Return both as a row holds them."""
        return {"ms": self.ms, "turns": self.turns}


def release(decoders: dict[str, Any]) -> None:
    """Empty a group of decoders and give its memory back now: they refer to themselves, and another group follows."""
    decoders.clear()
    gc.collect()


def synchronised_clock(device: torch.device) -> Clock:
    """Return a nanosecond clock that first waits for all work queued on `device`."""
    if device.type == "cuda":

        def cuda_clock() -> int:
            torch.cuda.synchronize(device)
            return time.perf_counter_ns()

        return cuda_clock
    return time.perf_counter_ns


def interleave(
    decoders: Mapping[str, Stepping], steps: int, warmup: int = 3, order_seed: int = 0
) -> dict[str, Samples]:
    """Decode `warmup + steps` tokens in every mode, one step of each mode per round, and return ms per step and mode.

    The k-th sample of one mode and the k-th of another belong to the same round: they are pairs. order_seed: draws the
    orders of the rounds. Counts are reset after warm-up, so `Decoder.counted` describes exactly the timed steps.
    """
    names = list(decoders)
    orders = random.Random(order_seed)
    for decoder in decoders.values():
        decoder.check_room(warmup + steps)
    clock = synchronised_clock(next(iter(decoders.values())).weights.device)
    for _ in range(warmup):
        for name in names:
            decoders[name].step()
    for decoder in decoders.values():
        decoder.reset_counts()
    samples = {name: Samples() for name in names}
    turns = itertools.count()
    for _ in range(steps):
        for name in orders.sample(names, len(names)):
            begin = clock()
            decoders[name].step()
            samples[name].ms.append((clock() - begin) / 1e6)
            samples[name].turns.append(next(turns))
    return samples


def profile_ops(decoder: Decoder, steps: int) -> dict[str, float]:
    """Return ms per step spent in each kind of operation, over `steps` further steps timed launch by launch."""
    decoder.check_room(steps)
    if decoder.weights.device.type == "cuda":
        return _profile_on_gpu(decoder, steps)
    clock = synchronised_clock(decoder.weights.device)
    spent: dict[str, float] = {}
    for _ in range(steps):
        for op in decoder.next_ops():
            begin = clock()
            op.launch()
            spent[op.name] = spent.get(op.name, 0.0) + (clock() - begin) / 1e6
    return {name: total / steps for name, total in spent.items()}


def _profile_on_gpu(decoder: Decoder, steps: int) -> dict[str, float]:
    """The same by events. The GPU first sleeps while the host queues the step, so that no launch waits for the host.

    A routed decoder waits for the GPU to tell which launches come next: it is asked before the sleep.
    """
    spent: dict[str, float] = {}
    for _ in range(steps):
        ops = decoder.next_ops()
        torch.cuda.synchronize()
        torch.cuda._sleep(QUEUEING_CYCLES)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(ops) + 1)]
        events[0].record()
        for op, event in zip(ops, events[1:], strict=True):
            op.launch()
            event.record()
        events[-1].synchronize()
        for op, (begin, end) in zip(ops, itertools.pairwise(events), strict=True):
            spent[op.name] = spent.get(op.name, 0.0) + begin.elapsed_time(end)
    return {name: total / steps for name, total in spent.items()}
