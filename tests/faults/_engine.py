"""Defects of the measuring cell itself, on a small synthetic model: each must end the cell as an error, before any row.

They hold for every claim whose cells decode (`artifact.measure.cells:decode`). The control measures the same group
without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch

from artifact.engine import timing
from artifact.engine.cache import KVCache
from artifact.engine.prepare import Prepared, prepare_synthetic
from artifact.errors import UserError
from artifact.kv.snapkv import SnapKV
from artifact.measure import cells
from artifact.measure.cells import member
from artifact.projection import teal
from artifact.projection.thresholds import Thresholds
from artifact.shapes import Shape
from artifact.stats import Verdict
from kernels import attention, sparse_gemv
from kernels.bandwidth import Bandwidth

from . import Trial

SHAPE = Shape("tiny", 96, 2, 6, 2, 32, 160, 211, 1024, False)
CONTEXT, STEPS = 256, 4
MEMORY = Bandwidth(200.0, 250.0)  # GB/s: more than any machine gives steps this small
WHERE = "every decoding cell"


@cache
def _prepared() -> Prepared:
    return prepare_synthetic(SHAPE, "cpu", torch.float32, CONTEXT + STEPS + cells.EXTRA_STEPS)


def measure() -> None:
    """One group of the four modes, with every check that a cell makes."""
    calibration, evaluation = torch.arange(512), torch.arange(512, 2048)
    teal.require_disjoint(calibration, evaluation)
    group = [member(CONTEXT, r_p, r_kv) for r_p, r_kv in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.3), (0.5, 0.3))]
    for row in cells.measure_group(_prepared(), group, STEPS):
        cells.check_bandwidth({**row, "llc_bytes": 0}, MEMORY)


def silently_dense() -> AbstractContextManager[object]:
    """The projection mode reads every weight whatever its thresholds"""
    everything = Thresholds(torch.full((SHAPE.layers, 7), -1.0), 0.5, "none")
    return mock.patch.object(teal.Calibration, "thresholds", lambda self, keep: everything)


def ratio_ignored() -> AbstractContextManager[object]:
    """The selection keeps 60% of the cache whatever it is asked for"""
    select = SnapKV.select
    return mock.patch.object(SnapKV, "select", lambda self, full, q, keep, *rest: select(self, full, q, 0.6, *rest))


def wrong_mask() -> AbstractContextManager[object]:
    """The sparse product reads each channel's neighbour"""
    bind = sparse_gemv.bind
    shifted = lambda x, w, *rest, **named: bind(x, w.roll(1, 0).contiguous(), *rest, **named)  # noqa: E731
    return mock.patch.object(sparse_gemv, "bind", shifted)


def wrong_rotary_position() -> AbstractContextManager[object]:
    """Keys and queries are rotated at other positions"""
    bind = attention.bind_step
    turned = lambda qkv, freq, *rest, **named: bind(qkv, freq * 1.5, *rest, **named)  # noqa: E731
    return mock.patch.object(attention, "bind_step", turned)


def off_by_one_block() -> AbstractContextManager[object]:
    """Attention leaves out the last block of sixteen entries"""
    bind = attention.bind_step

    def short(qkv: Any, freq: Any, at: Any, full: Any, packed: Any, lengths: torch.Tensor, *rest: Any) -> Any:
        return bind(qkv, freq, at, full, packed, lengths - 16, *rest)

    return mock.patch.object(attention, "bind_step", short)


def cache_reused_between_arms() -> AbstractContextManager[object]:
    """All arms append to one cache"""
    share, made = KVCache.share, {}

    def once(self: KVCache, tokens: int) -> KVCache:
        return made.setdefault(tokens, share(self, tokens))

    return mock.patch.object(KVCache, "share", once)


def work_left_out() -> AbstractContextManager[object]:
    """The clock runs, the steps do not: one step is decoded and its time reported for all"""
    real = timing.interleave

    def idle(decoders: Any, steps: int, warmup: int, order_seed: int) -> Any:
        found = real(decoders, 1, warmup)
        return {name: timing.Samples(one.ms * steps, list(range(steps))) for name, one in found.items()}

    return mock.patch.object(cells, "interleave", idle)


def unsynchronised_clock() -> AbstractContextManager[object]:
    """The clock stops before the work is done"""
    real = timing.synchronised_clock

    def early(device: torch.device) -> Callable[[], int]:
        clock = real(device)
        return lambda: clock() // 10_000_000_000

    return mock.patch.object(timing, "synchronised_clock", early)


@contextmanager
def calibrated_on_the_evaluation() -> Iterator[None]:
    """Thresholds are calibrated on the tokens that are evaluated"""
    real = teal.require_disjoint
    with mock.patch.object(
        teal, "require_disjoint", lambda calibration, evaluation: real(evaluation[:512], evaluation)
    ):
        yield


FAULTS = (
    silently_dense,
    ratio_ignored,
    wrong_mask,
    wrong_rotary_position,
    off_by_one_block,
    cache_reused_between_arms,
    work_left_out,
    unsynchronised_clock,
    calibrated_on_the_evaluation,
)


def trials() -> list[Trial]:
    """The control, then every defect. A cell that ends without an error would have been believed."""
    found = [Trial(WHERE, "", "an honest cell", *_outcome(None))]
    return found + [
        Trial(WHERE, fault.__name__, (fault.__doc__ or "").partition("\n")[0], *_outcome(fault)) for fault in FAULTS
    ]


def _outcome(fault: Callable[[], AbstractContextManager[object]] | None) -> tuple[Verdict, str]:
    try:
        if fault is None:
            measure()
        else:
            with fault():
                measure()
    except (RuntimeError, ValueError, IndexError, UserError) as error:
        return Verdict.ERROR, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return Verdict.REPRODUCED, ""
