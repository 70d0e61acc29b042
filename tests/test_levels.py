"""Levels of step times: exact without noise, and free of what all members of a round have in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from artifact.levels import levels_ms, with_levels

LEVELS = np.array([20.0, 24.0, 31.0, 33.0, 40.0, 47.0])


def samples(rounds: int, drift: float, noise: float, spikes: float, seed: int) -> NDArray[np.float64]:
    """Step times whose rounds wander together, with noise of their own and now and then twice the time."""
    rng = np.random.default_rng(seed)
    wander = drift * np.sin(np.arange(rounds) / 5 + rng.uniform(0, 6)) + drift * rng.standard_normal(rounds)
    own = noise * rng.standard_normal((len(LEVELS), rounds))
    late = np.where(rng.random((len(LEVELS), rounds)) < spikes, rng.uniform(0.2, 0.8, (len(LEVELS), rounds)), 0.0)
    return np.asarray(LEVELS[:, None] * np.exp(wander + own + late))


@given(st.integers(1, 12), st.lists(st.floats(1.0, 100.0), min_size=1, max_size=8), st.floats(0.1, 10.0))
def test_exact_when_members_differ_by_level_and_rounds_by_factor(
    rounds: int, levels: list[float], factor: float
) -> None:
    rhythm = np.exp(np.linspace(-0.3, 0.3, rounds) if rounds > 1 else np.zeros(1))
    found = levels_ms(factor * np.outer(levels, rhythm))
    assert found == pytest.approx(factor * np.array(levels), rel=1e-9)


def test_drift_that_all_members_share_leaves_ratios_alone() -> None:
    def spread(estimate: object, drift: float) -> float:
        assert callable(estimate)
        found = [estimate(samples(50, drift, 0.02, 0.05, seed)) for seed in range(40)]
        return float(np.std([np.log(level[4] / level[1]) for level in found]))

    assert spread(levels_ms, 0.15) == pytest.approx(spread(levels_ms, 0.0), rel=0.05)
    assert spread(levels_ms, 0.15) < 0.4 * spread(lambda one: np.quantile(one, 0.25, axis=1), 0.15)


def test_spikes_of_one_member_do_not_move_its_level() -> None:
    calm = samples(50, 0.1, 0.01, 0.0, 3)
    spiked = calm.copy()
    spiked[2, ::6] *= 2.5
    assert levels_ms(spiked) / levels_ms(calm) == pytest.approx(np.ones(len(LEVELS)), abs=0.01)


def test_groups_are_fitted_on_their_own() -> None:
    rows = [
        {"cell": "block-0", "block": 0, "group": group, "ms": list(level * np.array(rhythm))}
        for group, rhythm in enumerate(([1.0, 1.0, 1.2], [3.0, 1.0, 1.0]))
        for level in (10.0, 20.0)
    ]
    assert [row["level_ms"] for row in with_levels(rows)] == pytest.approx([10.0, 20.0, 10.0, 20.0])
    assert "level_ms" not in rows[0]


def test_members_with_unequal_or_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] samples"):
        with_levels([{"ms": [1.0, 2.0]}, {"ms": [1.0, 2.0, 3.0]}])
    with pytest.raises(ValueError, match=r"\[0\] samples"):
        with_levels([{"ms": []}])
