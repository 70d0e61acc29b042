"""What a request costs in each mode, from step times measured at a few lengths (crossover, section 5.4).

    cost(mode, n, m) = once(n) [kv and both] + sum over i < m of T_mode(e_mode(n) + i)

n prompt tokens, m generated ones. e is the number of cache entries that attention reads before the first step: n, or
r_kv n under the selection, which every step extends by one of its own. T_mode is the line through the measured step
times over e, so a request is priced along its generated sequence and pays for its selection once. Pure arithmetic, a
few microseconds a request; times in ms, lengths in tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artifact.account import Mode
from artifact.stats import require_equal_arms

SELECTING = (Mode.KV, Mode.BOTH)


class Line:
    """A piecewise-linear function through measured points (x, y).

    Before the first point it is constant: what a step costs at short contexts does not shrink. Past the last it goes
    on with the slope `beyond`, or with that of the last piece.
    """

    def __init__(self, points: Sequence[tuple[float, float]], beyond: float | None = None) -> None:
        """points: at least one, x increasing. Raises ValueError otherwise."""
        self.x = [float(x) for x, _ in points]
        self.y = [float(y) for _, y in points]
        if not points or any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError(f"a line needs points with increasing x, not {list(points)}")
        pairs = range(len(self.x) - 1)
        slopes = [(self.y[i + 1] - self.y[i]) / (self.x[i + 1] - self.x[i]) for i in pairs]
        last = slopes[-1] if slopes else 0.0
        self._slopes = [0.0, *slopes, last if beyond is None else beyond]
        self._areas = [0.0]  # integral from the first point to each point
        for i in pairs:
            self._areas.append(self._areas[-1] + (self.y[i] + self.y[i + 1]) / 2 * (self.x[i + 1] - self.x[i]))

    def at(self, x: float) -> float:
        """The value at x."""
        piece = bisect_right(self.x, x)
        base = max(piece - 1, 0)
        return self.y[base] + self._slopes[piece] * (x - self.x[base])

    def total(self, x: float, count: int) -> float:
        """The sum of the values at x, x + 1, ... x + count - 1.

        Taken as the integral from x - 1/2 to x + count - 1/2, which equals the sum on every straight piece.
        """
        return self._area(x + count - 0.5) - self._area(x - 0.5)

    def _area(self, x: float) -> float:
        piece = bisect_right(self.x, x)
        base = max(piece - 1, 0)
        run = x - self.x[base]
        return self._areas[base] + run * (self.y[base] + self._slopes[piece] * run / 2)


@dataclass(frozen=True)
class Costs:
    """Measured costs of one machine and model: step time per mode over entries read, selection over prompt tokens."""

    step_ms: Mapping[Mode, Line]
    once_ms: Line
    r_kv: float

    def entries(self, mode: Mode, prompt_tokens: float) -> float:
        """Cache entries that attention reads in `mode` before the first step."""
        return self.r_kv * prompt_tokens if mode in SELECTING else prompt_tokens

    def once(self, mode: Mode, prompt_tokens: float) -> float:
        """One-time ms of a mode: scoring and gather of the prompt, or nothing."""
        return max(0.0, self.once_ms.at(prompt_tokens)) if mode in SELECTING else 0.0

    def request_ms(self, mode: Mode, prompt_tokens: int, new_tokens: int) -> float:
        """Decode cost of a request in ms, its one-time cost included."""
        steps = self.step_ms[mode].total(self.entries(mode, prompt_tokens), new_tokens)
        return steps + self.once(mode, prompt_tokens)


def costs_from(
    contexts: Sequence[int],
    step_ms: Mapping[Mode, Sequence[float]],
    once: Sequence[tuple[int, float]],
    r_kv: float,
) -> Costs:
    """Costs from step times at `contexts` and one-time ms as (context, ms).

    A further entry costs the same whichever mode reads it, so past the measured entries all modes go on with the mean
    slope of dense decoding: a selection measured up to r_kv n entries may well grow past them.
    Raises ValueError when a mode has another number of times than there are contexts.
    """
    dense = step_ms[Mode.DENSE]
    slope = max(0.0, (dense[-1] - dense[0]) / (contexts[-1] - contexts[0])) if len(contexts) > 1 else 0.0
    lines = {}
    for mode, times in step_ms.items():
        share = r_kv if mode in SELECTING else 1.0
        lines[mode] = Line([(share * n, ms) for n, ms in zip(contexts, times, strict=True)], slope)
    return Costs(lines, Line([(float(n), ms) for n, ms in once]), r_kv)


def step_times(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[Mode, list[float]]]:
    """Contexts, and step ms per mode and context, from the timing rows of one process.

    Raises ValueError when a context lacks a mode or arms hold different numbers of steps.
    """
    from artifact.judge.levels import with_levels

    require_equal_arms({f"{row['mode']} at {row['context']}": row["ms"] for row in rows})
    contexts = sorted({int(row["context"]) for row in rows})
    found: dict[Mode, dict[int, float]] = {mode: {} for mode in Mode}
    for row in with_levels([dict(row) for row in rows]):
        found[Mode(row["mode"])][int(row["context"])] = row["level_ms"]
    if not contexts or any(sorted(times) != contexts for times in found.values()):
        raise ValueError(f"modes were not all timed at {contexts} tokens")
    return contexts, {mode: [times[n] for n in contexts] for mode, times in found.items()}
