"""The judge under noise that timing has: with seven blocks at most 2.5% of verdicts are wrong either way."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from artifact.report.judge_rates import LIMIT, NOISES, PLANS, SCALES, TRUTHS, Noise, bimodal_blocks, plan_text, simulate
from artifact.stats import Interval, Region, Verdict, block_interval, bootstrap, judge, t_interval

RUNS = 2000
# Three standard errors of a simulated share at the limit.
SLACK = 3 * math.sqrt(LIMIT * (1 - LIMIT) / RUNS)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.__name__)
def test_seven_blocks_keep_wrong_verdicts_under_the_limit(noise: Noise) -> None:
    rates = simulate(noise, 7, 7, RUNS)
    assert rates.false_reproduced <= LIMIT + SLACK
    assert rates.false_contradicted <= LIMIT + SLACK
    assert rates.reproduced > 0.5  # a judge that never commits would pass the two lines above


def test_the_simulation_would_notice_a_careless_judge() -> None:
    """Judging the point alone, or an interval without its t quantile, is wrong far more often at the edge."""
    rng = np.random.default_rng(0)
    estimates = rng.normal(loc=1.0, size=(RUNS, 6)) * 0.5 + 0.5
    region = Region(-1.0, 1.0, "test")
    means, errors = estimates.mean(axis=1), estimates.std(axis=1, ddof=1) / math.sqrt(6)
    for width in (0.0, 1.0):
        judged = [
            judge(Interval(m, m - width * e, m + width * e, 6, "t"), region) for m, e in zip(means, errors, strict=True)
        ]
        assert judged.count(Verdict.REPRODUCED) / RUNS > 4 * LIMIT


def test_fewer_than_seven_blocks_agree_by_chance_too_often() -> None:
    """n blocks of a two-state clock agree in 2 of 2^n runs, half of them on each side."""
    five, six, seven = (simulate(bimodal_blocks, blocks, blocks, 6000) for blocks in (5, 6, 7))
    assert five.false_reproduced == pytest.approx(1 / 32, abs=0.006)
    assert six.false_reproduced == pytest.approx(1 / 64, abs=0.005)
    assert six.false_contradicted == pytest.approx(2 / 64, abs=0.006)
    assert max(seven.false_reproduced, seven.false_contradicted) < LIMIT


def test_students_t_alone_is_too_narrow_for_a_two_state_clock() -> None:
    """Why `block_interval` is not t: seven blocks against one exclude the centre of such a clock by the t interval."""
    blocks = [1.0, *[-1.0] * 7]
    assert judge(t_interval(blocks), Region(0.0, None, "test")) is Verdict.CONTRADICTED
    assert judge(block_interval(blocks), Region(0.0, None, "test")) is Verdict.INCONCLUSIVE


def test_one_far_off_block_of_seven_leaves_the_verdict_to_the_six_others() -> None:
    """It moves the bound by half its distance; by the span of the blocks this run stayed undecided."""
    blocks = [-90.0, -20.0, 10.0, 60.0, 120.0, 170.0, 530.0]
    found = block_interval(blocks, unit="tokens")
    assert (found.low, found.high) == (-40.0, 325.0)  # the third lowest and third highest of the 28 averages of two
    assert judge(found, Region(-362.0, 362.0, "test")) is Verdict.REPRODUCED


def test_seven_blocks_on_one_side_of_a_bound_decide_and_six_of_seven_near_it_do_not() -> None:
    region = Region(0.0, None, "test")
    assert judge(block_interval([-float(i) for i in range(1, 8)]), region) is Verdict.CONTRADICTED
    assert judge(block_interval([-0.2, *(float(i) for i in range(1, 7))]), region) is Verdict.REPRODUCED
    assert judge(block_interval([-9.0, *(float(i) for i in range(1, 7))]), region) is Verdict.INCONCLUSIVE


def test_a_percentile_bootstrap_of_six_blocks_is_too_narrow() -> None:
    """Why `block_interval` is used for few blocks."""
    rng = np.random.default_rng(1)
    region = Region(-1.0, 1.0, "test")
    wrong = 0
    for run in range(150):
        blocks = [[value] for value in rng.normal(loc=1.0, scale=0.3, size=6)]
        wrong += (
            judge(bootstrap(blocks, lambda drawn: float(np.mean(drawn)), n=100, seed=run), region) is Verdict.REPRODUCED
        )
    assert wrong / 150 > 1.5 * LIMIT


def test_the_published_table_covers_every_noise_and_block_count() -> None:
    page = (Path(__file__).parent.parent / "docs" / "judge-rates.md").read_text(encoding="utf-8")
    for noise in NOISES:
        for plan in PLANS:
            assert f"| {noise.__name__.replace('_', ' ')} | {plan_text(*plan)} |" in page
    ours = [line for line in page.splitlines() if "| 7 |" in line]
    assert len(ours) == len(NOISES) and not any("**" in line for line in ours)
    assert 1.0 in TRUTHS and min(TRUTHS) < 1.0 < max(TRUTHS) and len(SCALES) == 3
