"""Intervals against scipy and closed forms; the three-way judgement at every border."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from artifact.stats import (
    Interval,
    Region,
    Verdict,
    binomial_p_value,
    block_interval,
    bootstrap,
    exact_interval,
    judge,
    paired_difference,
    paired_ratio,
    require_equal_arms,
    sign_test,
    t_interval,
    trimmed_mean,
    wilson,
)

FINITE = st.floats(-1e6, 1e6)


def interval(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high, 5, "test")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.0, 2.0, Verdict.REPRODUCED),  # the region is closed: touching it from inside is inside
        (1.5, 1.5, Verdict.REPRODUCED),
        (2.0, 3.0, Verdict.INCONCLUSIVE),  # touching it from outside is not disjoint
        (0.0, 1.0, Verdict.INCONCLUSIVE),
        (0.0, 9.0, Verdict.INCONCLUSIVE),
        (math.nextafter(2.0, 3.0), 3.0, Verdict.CONTRADICTED),
        (0.0, math.nextafter(1.0, 0.0), Verdict.CONTRADICTED),
        (math.nan, 2.0, Verdict.INCONCLUSIVE),
        (-math.inf, math.inf, Verdict.INCONCLUSIVE),
        (3.0, math.inf, Verdict.INCONCLUSIVE),
        (2.0, 1.0, Verdict.INCONCLUSIVE),
    ],
)
def test_judgement_at_every_border(low: float, high: float, verdict: Verdict) -> None:
    assert judge(interval(low, high), Region(1.0, 2.0, "test")) is verdict


def test_an_open_side_accepts_everything_finite_on_that_side() -> None:
    assert judge(interval(5, 6), Region(5.0, None, "test")) is Verdict.REPRODUCED
    assert judge(interval(-9, 4.9), Region(5.0, None, "test")) is Verdict.CONTRADICTED
    assert judge(interval(5, math.inf), Region(5.0, None, "test")) is Verdict.INCONCLUSIVE
    assert judge(exact_interval(math.nan), Region(None, None, "test")) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    "region", [Region(math.nan, 2.0, "test"), Region(1.0, math.nan, "test"), Region(2.0, 1.0, "test")]
)
def test_a_region_that_is_not_one_decides_nothing(region: Region) -> None:
    assert judge(interval(1.2, 1.3), region) is Verdict.INCONCLUSIVE


@given(a=FINITE, b=FINITE, low=FINITE, width=st.floats(0, 1e6))
def test_a_narrower_region_never_helps_and_verdicts_exclude_each_other(
    a: float, b: float, low: float, width: float
) -> None:
    measured = interval(min(a, b), max(a, b))
    wide, narrow = Region(low, low + width, "test"), Region(low + width / 4, low + width / 2, "test")
    if judge(measured, narrow) is Verdict.REPRODUCED:
        assert judge(measured, wide) is Verdict.REPRODUCED
    if judge(measured, wide) is Verdict.CONTRADICTED:
        assert judge(measured, narrow) is Verdict.CONTRADICTED


@given(st.lists(FINITE, min_size=2, max_size=12), st.sampled_from([0.9, 0.95, 0.99]))
def test_t_interval_is_scipys(values: list[float], level: float) -> None:
    ours = t_interval(values, level)
    if np.std(values) > 1e-6:
        theirs = reference.t.interval(level, len(values) - 1, np.mean(values), reference.sem(values))
        assert (ours.low, ours.high) == pytest.approx(theirs, rel=1e-9, abs=1e-6)
    assert ours.low <= ours.point <= ours.high and ours.n == len(values)


@pytest.mark.parametrize(("n", "critical"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)])
def test_the_block_interval_drops_as_many_averages_as_the_signed_rank_table_says(n: int, critical: int) -> None:
    """Critical values of Wilcoxon's statistic, two-sided 5%, as printed in textbooks."""
    values = np.random.default_rng(n).normal(size=n)
    averages = sorted((values[i] + values[j]) / 2 for i in range(n) for j in range(i, n))
    found = block_interval(values.tolist())
    assert (found.low, found.high) == (averages[critical], averages[-1 - critical])
    assert found.point == pytest.approx(float(np.median(averages)))
    # What the interval leaves out is what scipy's exact test rejects.
    for shift in (found.low - 1e-6, found.high + 1e-6):
        assert reference.wilcoxon(values - shift, method="exact").pvalue <= 0.05
    for shift in (found.low + 1e-6, found.high - 1e-6):
        assert reference.wilcoxon(values - shift, method="exact").pvalue > 0.05


@given(st.lists(FINITE, min_size=2, max_size=5))
def test_few_blocks_get_the_hull_of_the_t_interval_and_of_themselves(values: list[float]) -> None:
    hull, t = block_interval(values), t_interval(values)
    assert (hull.low, hull.high) == (min(t.low, *values), max(t.high, *values)) and hull.point == t.point


@given(st.lists(FINITE, min_size=6, max_size=12), st.floats(-1e6, 1e6), st.floats(0.1, 10))
def test_the_block_interval_moves_and_scales_with_its_blocks(values: list[float], shift: float, scale: float) -> None:
    found, moved = block_interval(values), block_interval([shift + scale * value for value in values])
    assert min(values) <= found.low <= found.point <= found.high <= max(values)
    for before, after in ((found.low, moved.low), (found.point, moved.point), (found.high, moved.high)):
        assert after == pytest.approx(shift + scale * before, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan, 2.0], [1.0, math.inf]])
def test_too_few_or_lost_blocks_prove_nothing(values: list[float]) -> None:
    assert judge(t_interval(values), Region(None, None, "test")) is Verdict.INCONCLUSIVE
    assert judge(block_interval(values), Region(None, None, "test")) is Verdict.INCONCLUSIVE
    assert judge(paired_ratio(values, values), Region(None, None, "test")) is Verdict.INCONCLUSIVE


def test_bootstrap_resamples_blocks_and_then_rows() -> None:
    """With no variation inside blocks only the blocks matter, and the other way round; both together are wider."""
    rng = np.random.default_rng(1)
    centres = rng.normal(size=40)

    def mean(blocks: list[np.ndarray]) -> float:
        return float(np.mean([block.mean() for block in blocks]))

    between = bootstrap([np.full(30, c) for c in centres], mean)
    within = bootstrap([rng.normal(size=30) for _ in centres], mean)
    both = bootstrap([c + rng.normal(size=30) for c in centres], mean)
    assert between.high - between.low == pytest.approx(2 * 1.96 * centres.std() / math.sqrt(40), rel=0.1)
    # Rows of one block vary twice: which blocks are drawn, then which rows.
    assert within.high - within.low == pytest.approx(2 * 1.96 * math.sqrt(2) / math.sqrt(40 * 30), rel=0.15)
    assert both.high - both.low > between.high - between.low


def test_bootstrap_keeps_pairs_together_and_is_repeatable() -> None:
    rng = np.random.default_rng(2)
    clock = rng.lognormal(sigma=1.0, size=(5, 60, 1))
    blocks = [block * np.array([2.0, 1.0]) for block in clock]

    def ratio(drawn: list[np.ndarray]) -> float:
        return float(np.median(np.concatenate([block[:, 0] / block[:, 1] for block in drawn])))

    found = bootstrap(blocks, ratio, n=200)
    assert (found.low, found.point, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert bootstrap(blocks, ratio, n=50, seed=3) == bootstrap(blocks, ratio, n=50, seed=3)


@pytest.mark.parametrize("blocks", [[], [[1.0], []], [[1.0, math.nan]]])
def test_bootstrap_of_missing_samples_proves_nothing(blocks: list[list[float]]) -> None:
    found = bootstrap(blocks, lambda drawn: float(np.mean(np.concatenate(drawn))), n=50)
    assert judge(found, Region(None, None, "test")) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (16, 40), (1, 1000)])
def test_wilson_is_scipys(k: int, n: int) -> None:
    theirs = reference.binomtest(k, n).proportion_ci(method="wilson")
    ours = wilson(k, n)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert wilson(0, 0).low == 0.0 and judge(wilson(0, 0), Region(0.0, 1.0, "test")) is Verdict.INCONCLUSIVE


@given(n=st.integers(1, 60), data=st.data(), p=st.floats(0, 1))
def test_the_binomial_test_is_scipys(n: int, data: st.DataObject, p: float) -> None:
    k = data.draw(st.integers(0, n))
    assert binomial_p_value(k, n, p) == pytest.approx(reference.binomtest(k, n, p).pvalue, abs=1e-9)


@pytest.mark.parametrize(("k", "n", "p"), [(3, 2, 0.5), (-1, 2, 0.5), (1, 2, 1.5), (1, 2, math.nan)])
def test_impossible_counts_are_refused(k: int, n: int, p: float) -> None:
    with pytest.raises(ValueError, match=r"trials|success rate"):
        binomial_p_value(k, n, p)


def test_pairs_cancel_what_both_arms_share() -> None:
    clock = np.random.default_rng(0).lognormal(sigma=2.0, size=8)
    ratio = paired_ratio((3.0 * clock).tolist(), clock.tolist())
    assert (ratio.low, ratio.high) == pytest.approx((3.0, 3.0))
    difference = paired_difference((clock + 1).tolist(), clock.tolist())
    assert (difference.low, difference.high) == pytest.approx((1.0, 1.0))
    assert math.isnan(paired_ratio([1.0, -1.0], [1.0, 1.0]).low)


def test_the_sign_test_leaves_ties_out() -> None:
    assert sign_test([1, 1, 1, 1, 5], [0, 0, 0, 0, 5]) == pytest.approx(2 / 16)
    assert sign_test([1, 2], [1, 2]) == 1.0


def test_unequal_arms_are_an_error_that_names_them() -> None:
    """A sample that failed in one arm only must not be dropped from that arm alone."""
    assert require_equal_arms({"dense": [1, 2], "kv": [3, 4]}) == 2
    with pytest.raises(ValueError, match="dense 2, kv 1"):
        require_equal_arms({"dense": [1, 2], "kv": [3]})
    for paired in (paired_difference, paired_ratio, sign_test):
        with pytest.raises(ValueError, match="unequal"):
            paired([1.0, 2.0], [1.0])


def test_a_trimmed_mean_is_scipys_and_sees_both_kinds_of_a_mixture() -> None:
    values = [1.0, 2.0] * 20 + [50.0, 0.01]
    assert trimmed_mean(values) == pytest.approx(reference.trim_mean(values, 0.1))
    assert 1.4 < trimmed_mean(values) < 1.6
    for bad, cut in (([], 0.1), (values, 0.5)):
        with pytest.raises(ValueError, match="does not exist"):
            trimmed_mean(bad, cut)
