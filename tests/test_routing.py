"""Routing scores and thresholds against the definitions, and the cases the paper leaves open."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifact.errors import UserError
from artifact.projection import routing

VOCAB = 9


def test_a_score_is_the_mean_excess_damage_of_the_ids_own_occurrences() -> None:
    tokens = torch.tensor([3, 3, 3, 5, 0])
    base = torch.tensor([1.0, 1.0, 1.0, 2.0, 4.0])
    sparse = torch.tensor([2.0, 0.5, 1.5, 2.5, 1.0])  # damage 1, 0 (it gained), 0.5, 0.5, 0
    found = routing.scores(VOCAB, tokens, base, sparse)
    assert float(found.values[3]) == pytest.approx(0.5)
    assert float(found.values[5]) == pytest.approx(0.5)
    assert float(found.values[0]) == pytest.approx(0.0, abs=1e-8)
    assert found.prior == pytest.approx(0.4)
    assert float(found.values[8]) == pytest.approx(0.4)
    assert found.counts.tolist() == [1, 0, 0, 3, 0, 1, 0, 0, 0]


def test_a_weighted_prior_pulls_rare_ids_more_than_frequent_ones() -> None:
    tokens = torch.tensor([1] * 10 + [2])
    sparse = torch.tensor([1.0] * 10 + [3.0])
    found = routing.scores(VOCAB, tokens, torch.zeros(11), sparse, weight=2.0)
    prior = 13 / 11
    assert float(found.values[1]) == pytest.approx((10 + 2 * prior) / 12)
    assert float(found.values[2]) == pytest.approx((3 + 2 * prior) / 3)
    assert float(found.values[7]) == pytest.approx(prior)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), st.floats(0.01, 1.0), st.integers(0, 5))
def test_the_threshold_is_the_argmin_over_all_thresholds(held_out: list[int], share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(VOCAB, generator=generator, dtype=torch.float64) * 4).round() / 4  # with ties
    found = routing.Scores(values, torch.ones(VOCAB, dtype=torch.int64), 0.5)
    tokens = torch.tensor(held_out)

    def routed(tau: float) -> float:
        return float(found.table(tau)[tokens].double().mean())

    tau = found.threshold(tokens, share)
    grid = [*sorted(set(values.tolist())), math.inf]
    least = min(abs(routed(one) - share) for one in grid)
    assert abs(routed(tau) - share) == pytest.approx(least, abs=1e-12)


def test_of_equally_close_thresholds_fewer_tokens_are_routed() -> None:
    found = routing.Scores(torch.tensor([0.0, 1.0], dtype=torch.float64), torch.ones(2, dtype=torch.int64), 0.5)
    # Routing none or half is equally far from a quarter.
    assert not bool(found.table(found.threshold(torch.tensor([0, 1]), 0.25)).any())


def test_ids_never_seen_are_told_apart_by_their_number() -> None:
    """Of equal scores the lower id is routed first, so that every share can be reached."""
    found = routing.scores(1000, torch.tensor([0]), torch.zeros(1), torch.ones(1))
    held_out = torch.arange(1, 1000)
    table = found.table(found.threshold(held_out, 0.25))
    assert float(table[held_out].double().mean()) == pytest.approx(0.25, abs=0.002)
    assert bool(table[1:200].all()) and not bool(table[300:].any())


def test_everything_may_be_routed_and_a_broken_corpus_is_refused() -> None:
    found = routing.scores(VOCAB, torch.tensor([1, 2]), torch.zeros(2), torch.tensor([0.5, 0.1]))
    assert bool(found.table(found.threshold(torch.tensor([1, 2, 2]), 1.0)).all())
    with pytest.raises(UserError, match="empty"):
        routing.scores(VOCAB, torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
    with pytest.raises(UserError, match="not finite"):
        routing.scores(VOCAB, torch.tensor([1]), torch.zeros(1), torch.tensor([float("nan")]))
    with pytest.raises(UserError, match="routed share is 0"):
        found.threshold(torch.tensor([1]), 0.0)
    with pytest.raises(UserError, match="no held-out tokens"):
        found.threshold(torch.zeros(0, dtype=torch.int64), 0.5)


def test_a_random_table_reaches_the_share_without_knowing_anything() -> None:
    tokens = torch.arange(1000)
    table = routing.random_scores(1000, 1)
    assert float(table.table(table.threshold(tokens, 0.25)).double().mean()) == pytest.approx(0.25, abs=0.002)
    assert not torch.equal(table.values, routing.random_scores(1000, 2).values)
