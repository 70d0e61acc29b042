"""Keep ratios of equal quality: perplexity increase against keep ratio, interpolated, with windows as the unit of
resampling (crossover, section 5.2, Figure 6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifact.measure import quality
from artifact.measure.configuration import from_record
from artifact.stats import Interval

Row = Mapping[str, Any]
Array = NDArray[np.float64]
DRAWS = 2000


@dataclass(frozen=True)
class Sweep:
    """projection, selection: keep ratio -> extra nats per window (windows,) over dense, both including 1.0 at zero."""

    projection: dict[float, Array]
    selection: dict[float, Array]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Sweep:
        """Build from window rows; ValueError when arms differ in windows or a branch has no measured keep ratio."""
        found = quality.losses(rows)
        dense = np.array(quality.window_means(found, "dense"))
        zero = np.zeros_like(dense)
        branches: dict[str, dict[float, Array]] = {"projection": {1.0: zero}, "selection": {1.0: zero}}
        for row in {row["label"]: row for row in rows}.values():
            configuration = from_record(row)
            if configuration.kind != "single" or configuration.method == "window":
                continue
            branch, keep = (
                ("projection", configuration.r_p) if configuration.r_p < 1 else ("selection", configuration.r_kv)
            )
            branches[branch][keep] = np.array(quality.window_means(found, configuration.label)) - dense
        for name, sweep in branches.items():
            if len(sweep) < 2:
                raise ValueError(f"the {name} branch has no measured keep ratio")
        return cls(branches["projection"], branches["selection"])

    @property
    def windows(self) -> int:
        return len(self.projection[1.0])

    def keeps(self, budget: float, drawn: NDArray[np.int64] | None = None) -> tuple[float, float]:
        """The smallest (r_p, r_kv) whose increase stays within `budget`, a share of dense perplexity."""
        chosen = np.arange(self.windows) if drawn is None else drawn
        return _keep_at(self.projection, budget, chosen), _keep_at(self.selection, budget, chosen)

    def interval(self, budget: float, value: Callable[[float, float], float]) -> tuple[float, float, float]:
        """Point and 95% bootstrap ends over windows of value(r_p, r_kv) at a budget."""
        generator = np.random.default_rng(0)
        draws = [value(*self.keeps(budget, generator.integers(self.windows, size=self.windows))) for _ in range(DRAWS)]
        # Ends are order statistics: infinite draws stay what they are.
        low, high = np.quantile(draws, (0.025, 0.975), method="nearest")
        return value(*self.keeps(budget)), float(low), float(high)

    def least_step(self, keeps: Sequence[float]) -> Interval:
        """Paired interval of the extra nats from one projection keep to the next, of the least resolved step."""
        steps = [self.projection[lower] - self.projection[upper] for upper, lower in pairwise(keeps)]
        return min(map(quality.mean_interval, steps), key=lambda interval: interval.low)

    def points(self) -> list[dict[str, Any]]:
        """For a figure: branch, keep ratio and the increase (share of dense perplexity) with its interval."""
        found = []
        for branch, sweep in (("projection", self.projection), ("selection", self.selection)):
            for keep in sorted(sweep, reverse=True):
                mean = quality.mean_interval(sweep[keep])
                ends = {name: float(np.expm1(getattr(mean, name))) for name in ("point", "low", "high")}
                found.append({"branch": branch, "keep": keep, **ends})
        return found


def _keep_at(sweep: Mapping[float, Array], budget: float, chosen: NDArray[np.int64]) -> float:
    """Walk down from keep 1 and stop where the interpolated increase first exceeds the budget."""
    keeps = sorted(sweep, reverse=True)
    limit = np.log1p(budget)
    costs = [float(sweep[keep][chosen].mean()) for keep in keeps]
    for upper, lower, before, after in zip(keeps, keeps[1:], costs, costs[1:], strict=False):
        if after > limit:
            share = 0.0 if after == before else max(0.0, (limit - before) / (after - before))
            return upper - share * (upper - lower)
    return keeps[-1]
