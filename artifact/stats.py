"""Intervals over blocks and the three-way judgement of an interval against an acceptance region.

Knows numbers only: no claims, no files, no clocks. A block is one process; blocks are the unit of independence,
steps inside a block are not. For the few blocks of a timing claim use `block_interval` over one estimate per block: a
percentile bootstrap of so few is too narrow, and so is Student's t when a clock has two states (docs/judge-rates.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.float64]


class Verdict(StrEnum):
    """What a predicate or a claim comes to. OBSERVED: measured where the claim asserts nothing."""

    REPRODUCED = "reproduced"
    CONTRADICTED = "contradicted"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not-run"
    ERROR = "error"
    OBSERVED = "observed"


@dataclass(frozen=True)
class Interval:
    """A point estimate with its interval, in `unit`; `n` independent observations by `method`."""

    point: float
    low: float
    high: float
    n: int
    method: str
    unit: str = ""

    @property
    def finite(self) -> bool:
        """Whether all three numbers are finite and in order."""
        return all(map(math.isfinite, (self.point, self.low, self.high))) and self.low <= self.high


@dataclass(frozen=True)
class Region:
    """A closed acceptance region; None leaves a side unbounded. `reason` says in one line why it lies there."""

    low: float | None
    high: float | None
    reason: str
    unit: str = ""


def judge(interval: Interval, region: Region) -> Verdict:
    """Inside is reproduced, disjoint is contradicted, straddling or not finite is inconclusive."""
    low = -math.inf if region.low is None else region.low
    high = math.inf if region.high is None else region.high
    if not interval.finite or math.isnan(low) or math.isnan(high) or low > high:
        return Verdict.INCONCLUSIVE
    if low <= interval.low and interval.high <= high:
        return Verdict.REPRODUCED
    if interval.high < low or interval.low > high:
        return Verdict.CONTRADICTED
    return Verdict.INCONCLUSIVE


def exact_interval(value: float, unit: str = "") -> Interval:
    """The interval of a number that is computed, not sampled: a byte count, an algebraic identity."""
    return Interval(value, value, value, 1, "exact", unit)


def t_interval(block_estimates: Sequence[float], level: float = 0.95, unit: str = "") -> Interval:
    """Student's t interval for the mean of one estimate per block. Fewer than two blocks leave it unbounded.

    A non-finite estimate makes the interval NaN: a lost block is never dropped in silence.
    """
    values = np.asarray(block_estimates, dtype=np.float64).reshape(-1)
    method = f"t {level:.0%} over blocks"
    n = len(values)
    if n == 0 or not np.isfinite(values).all():
        return Interval(math.nan, math.nan, math.nan, n, method, unit)
    mean = float(values.mean())
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n, method, unit)
    half = t_quantile(0.5 + level / 2, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, method, unit)


def block_interval(block_estimates: Sequence[float], level: float = 0.95, unit: str = "") -> Interval:
    """The interval for a few blocks of unknown noise: Wilcoxon's signed-rank interval from six blocks on.

    It covers the centre of any symmetric distribution, two-state clocks and far-off blocks included, and a single
    block moves it by half its distance at most. Its bounds are averages of two blocks (Hodges and Lehmann 1963), its
    point their median. Fewer than six blocks cannot reach the level so: they get the hull of the t interval and of
    all blocks, which is wide and, for a clock of two states, still not wide enough.
    """
    t = t_interval(block_estimates, level, unit)
    if not t.finite:
        return t
    ordered = np.sort(np.asarray(block_estimates, dtype=np.float64))
    dropped = _signed_rank(len(ordered), (1 - level) / 2)
    if dropped is not None:
        first, second = np.triu_indices(len(ordered))
        averages = np.sort((ordered[first] + ordered[second]) / 2)
        low, high = float(averages[dropped]), float(averages[len(averages) - 1 - dropped])
        return Interval(float(np.median(averages)), low, high, t.n, f"signed-rank {level:.0%} over blocks", unit)
    method = f"t {level:.0%} and span of blocks"
    return Interval(t.point, min(t.low, float(ordered[0])), max(t.high, float(ordered[-1])), t.n, method, unit)


@functools.cache
def _signed_rank(n: int, tail: float) -> int | None:
    """Largest w with P(W <= w) <= tail for Wilcoxon's signed-rank statistic W of n observations; None when none is.

    W is the sum of a random subset of 1..n. The interval drops the w outermost averages on either side.
    """
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    within = int((np.cumsum(ways) / 2.0**n <= tail).sum())
    return within - 1 if within else None


def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(df, p))


def bootstrap(
    blocks: Sequence[Sequence[float] | Block],
    statistic: Callable[[list[Block]], float],
    level: float = 0.95,
    n: int = 2000,
    seed: int = 0,
    unit: str = "",
) -> Interval:
    """Percentile bootstrap that resamples blocks, then the rows inside each chosen block.

    A block is an array whose first axis is resampled, so paired measurements (rows, modes) stay paired. `statistic`
    maps a list of blocks to one number. Draws that are not finite make the interval NaN.
    """
    data = [np.asarray(block, dtype=np.float64) for block in blocks]
    method = f"bootstrap {level:.0%} blocks then rows, {n} draws"
    if not data or any(len(block) == 0 for block in data):
        return Interval(math.nan, math.nan, math.nan, len(data), method, unit)
    rng = np.random.default_rng(seed)
    draws = np.empty(n)
    for i in range(n):
        chosen = [data[j] for j in rng.integers(len(data), size=len(data))]
        draws[i] = statistic([block[rng.integers(len(block), size=len(block))] for block in chosen])
    low, high = np.quantile(draws, [0.5 - level / 2, 0.5 + level / 2])
    return Interval(float(statistic(data)), float(low), float(high), len(data), method, unit)


def paired_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95, unit: str = "") -> Interval:
    """t interval for the mean of a - b over pairs (same block, window or prompt in both arms)."""
    require_equal_arms({"a": a, "b": b})
    return t_interval(np.subtract(a, b).tolist(), level, unit)


def paired_ratio(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Interval:
    """t interval for the geometric mean of a / b over pairs, computed on log ratios. Non-positive values give NaN."""
    require_equal_arms({"a": a, "b": b})
    pairs = np.column_stack([a, b]).astype(np.float64)
    if not ((pairs > 0) & np.isfinite(pairs)).all():
        return Interval(math.nan, math.nan, math.nan, len(pairs), f"t {level:.0%} over log ratios", "x")
    logs = t_interval(np.log(pairs[:, 0] / pairs[:, 1]).tolist(), level)
    with np.errstate(over="ignore"):  # infinite is the right answer, and judged inconclusive
        point, low, high = (float(np.exp(v)) for v in (logs.point, logs.low, logs.high))
    return Interval(point, low, high, logs.n, f"t {level:.0%} over log ratios", "x")


def trimmed_mean(values: Sequence[float], cut: float = 0.1) -> float:
    """Mean without the share `cut` of values at either end. ValueError for no values or a cut outside [0, 0.5)."""
    if not 0.0 <= cut < 0.5 or not len(values):
        raise ValueError(f"a mean of {len(values)} values trimmed by {cut} at either end does not exist")
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    skip = int(cut * len(ordered))
    return float(ordered[skip : len(ordered) - skip].mean())


def over_dense(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Step time of every arm over that of the arm "dense": the trimmed mean of paired steps. The steps of a routed arm
    are of two kinds, of which a median would show one. ValueError for arms of unequal length.
    """
    require_equal_arms(times)
    return {
        name: trimmed_mean([ours / dense for ours, dense in zip(own, times["dense"], strict=True)])
        for name, own in times.items()
    }


def wilson(k: int, n: int, level: float = 0.95) -> Interval:
    """Wilson score interval for a share of k successes in n trials. No trials: [0, 1] around NaN."""
    _require_count(k, n)
    method = f"Wilson {level:.0%}"
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0, method)
    from scipy.special import ndtri

    z2 = float(ndtri(0.5 + level / 2)) ** 2
    p = k / n
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return Interval(
        p, 0.0 if k == 0 else max(0.0, centre - half), 1.0 if k == n else min(1.0, centre + half), n, method
    )


def clopper_pearson(k: int, n: int, level: float = 0.95) -> Interval:
    """Exact interval for a share of k successes in n trials: it covers at any n. No trials: [0, 1] around NaN."""
    _require_count(k, n)
    method = f"Clopper-Pearson {level:.0%}"
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0, method)
    from scipy.special import betaincinv

    tail = 0.5 - level / 2
    low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, tail))
    high = 1.0 if k == n else float(betaincinv(k + 1, n - k, 1.0 - tail))
    return Interval(k / n, low, high, n, method)


def binomial_p_value(k: int, n: int, p: float) -> float:
    """Exact two-sided binomial test: total probability of outcomes no likelier than k under success rate p."""
    _require_count(k, n)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"success rate {p} is outside [0, 1]")
    if p in (0.0, 1.0):
        return float(k == round(n * p))
    counts = np.arange(n + 1)
    log_choose = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in counts])
    mass = np.exp(log_choose + counts * math.log(p) + (n - counts) * math.log1p(-p))
    # Outcomes whose mass equals that of k up to rounding belong to the tail.
    return float(min(1.0, mass[mass <= mass[k] * (1 + 1e-7)].sum()))


def sign_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Exact two-sided p-value that neither arm wins more pairs; ties are left out, as in the textbook test."""
    require_equal_arms({"a": a, "b": b})
    difference = np.subtract(a, b)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return binomial_p_value(wins, wins + losses, 0.5) if wins + losses else 1.0


def require_equal_arms(arms: Mapping[str, Sequence[object]]) -> int:
    """The common sample count of all arms.

    ValueError when they differ: a sample lost in one arm only biases the other.
    """
    sizes = {name: len(values) for name, values in arms.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"arms have unequal sample counts: {', '.join(f'{k} {v}' for k, v in sorted(sizes.items()))}")
    return next(iter(sizes.values()))


def _require_count(k: int, n: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"{k} successes in {n} trials")
