"""The order of what is done around timed launches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from artifact.engine import timing
from artifact.engine.step import Op


def test_a_step_is_asked_for_before_the_gpu_sleeps_and_queued_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A routed decoder waits for the GPU when asked: behind the sleep, it would wait for the sleep's end too."""
    done: list[str] = []

    class Event:
        def __init__(self, **_: object) -> None: ...

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 0.5

    class Routed:
        weights = SimpleNamespace(device=torch.device("cuda"))

        def check_room(self, steps: int) -> None: ...

        def next_ops(self) -> list[Op]:
            done.append("asked")
            return [Op("gemv", lambda: done.append("launched"))]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("asleep"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert timing.profile_ops(Routed(), 2) == {"gemv": 0.5}  # type: ignore[arg-type]
    assert done == ["asked", "idle", "asleep", "event", "launched", "event"] * 2
