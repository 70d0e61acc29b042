"""Levels of step times: exact without noise, and free of what all members of a round have in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from artifact.judge.levels import levels_ms, with_levels

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


def in_turns(
    rounds: int, rho: float, noise: float, spikes: float, seed: int, levels: NDArray[np.float64] = LEVELS
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Step times under a state of the machine that outlasts a turn, in random orders; and the turns they were taken
    in.
    """
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(levels)) for _ in range(rounds)])
    state = np.zeros(len(order))
    for i in range(1, len(order)):
        state[i] = rho * state[i - 1] + noise * rng.standard_normal()
    late = np.where(rng.random(len(order)) < spikes, rng.uniform(0.2, 0.8, len(order)), 0.0)
    times, turns = np.empty((len(levels), rounds)), np.empty((len(levels), rounds), dtype=np.int64)
    for m in range(len(levels)):
        turns[m] = np.flatnonzero(order == m)
        times[m] = levels[m] * np.exp((state + late)[turns[m]])
    return times, turns


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.8])
def test_a_state_that_outlasts_a_turn_is_taken_out(rho: float) -> None:
    many = np.linspace(20.0, 47.0, 20)

    def spread(with_turns: bool) -> float:
        logs = []
        for seed in range(60):
            times, turns = in_turns(30, rho, 0.05, 0.05, seed, many)
            level = levels_ms(times, turns if with_turns else None)
            logs.append(np.log(level[16] / level[4]))
        assert np.mean(logs) == pytest.approx(np.log(many[16] / many[4]), abs=4 * np.std(logs) / np.sqrt(60))
        return float(np.std(logs))

    assert spread(True) < {0.0: 1.1, 0.6: 1.0, 0.8: 0.85}[rho] * spread(False)


def test_exact_without_noise_whatever_the_turns() -> None:
    times, turns = in_turns(7, 0.7, 0.0, 0.0, 0)
    assert levels_ms(times, turns) == pytest.approx(LEVELS, rel=1e-9)


def test_turns_of_absent_members_are_no_neighbours() -> None:
    """Levels of a part of the group stay those of the group: pairs across a gap are left out."""
    times, turns = in_turns(200, 0.7, 0.05, 0.0, 5)
    some = [0, 2, 3, 5]
    assert levels_ms(times[some], turns[some]) == pytest.approx(LEVELS[some], rel=0.03)
    alone = levels_ms(times[:1], turns[:1] * 2)  # never a neighbour: the coarser model serves
    assert alone == pytest.approx(LEVELS[:1], rel=0.05)


def test_rows_with_turns_are_fitted_over_turns() -> None:
    times, turns = in_turns(30, 0.8, 0.05, 0.05, 9)
    rows = [{"ms": list(ms), "turns": [int(t) for t in at]} for ms, at in zip(times, turns, strict=True)]
    assert [row["level_ms"] for row in with_levels(rows)] == pytest.approx(levels_ms(times, turns))


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
