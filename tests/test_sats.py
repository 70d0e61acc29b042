"""CATS and SATS thresholds: definitions against a plain float64 computation, and the cases the paper leaves open."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifact.engine.models import Weights
from artifact.errors import UserError
from artifact.projection import cats, gate_stats, sats
from artifact.projection.gate_stats import GateStatistics, Reservoir
from artifact.projection.magnitudes import Magnitudes
from artifact.projection.sats import Curves
from tests.models_fixture import Loaded, token_ids

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(tiny: Tiny) -> Weights:
    return tiny("llama").weights


@pytest.fixture(scope="module")
def statistics(weights: Weights) -> GateStatistics:
    return gate_stats.collect(weights, token_ids(480, seed=3).view(4, 120), rows=64)


def quantiles_of(statistics: GateStatistics) -> torch.Tensor:
    return torch.stack([gate_stats.quantile_table(gate) for gate in statistics.gates])


def curves_of(errors: list[list[float]], shares: list[list[float]] | None = None) -> Curves:
    """Curves with candidates -1, 0, 1, 2 ... and, unless given, shares in equal steps."""
    table = torch.tensor(errors, dtype=torch.float64)
    steps = torch.arange(table.shape[1], dtype=torch.float64)
    own = (steps / table.shape[1]).expand_as(table) if shares is None else torch.tensor(shares, dtype=torch.float64)
    return Curves((steps - 1).expand_as(table).contiguous(), table, own.contiguous())


def plain_errors(weights: Weights, layer: int, x: torch.Tensor, limits: list[float], epsilon: float) -> list[float]:
    """Equation 6 written out in float64, thresholded outputs formed in full."""
    one = weights.layers[layer]
    gate, up = (x.double() @ one.gate_up.w.double().T).chunk(2, dim=-1)
    silu = gate / (1 + torch.exp(-gate))
    y = (silu * up) @ one.down.w.double().T
    found = []
    for limit in limits:
        kept = torch.where(silu.abs() > limit, silu, 0.0)
        thresholded = (kept * up) @ one.down.w.double().T
        found.append(float(((y - thresholded).norm(dim=1) / (y.norm(dim=1) + epsilon)).mean()))
    return found


@pytest.mark.parametrize("epsilon", [1e-6, 5.0])
def test_the_error_is_equation_6(weights: Weights, statistics: GateStatistics, epsilon: float) -> None:
    limits = [-1.0, 0.0, 0.05, 0.3, 1e9]
    for layer in range(3):
        x = statistics.inputs[layer]
        found = gate_stats.errors(weights.layers[layer], x, torch.tensor(limits), epsilon)
        assert found.tolist() == pytest.approx(plain_errors(weights, layer, x, limits, epsilon), rel=1e-4, abs=1e-6)
        assert found[0] == 0.0 and (epsilon > 1 or float(found[-1]) == pytest.approx(1.0, rel=1e-5))


@pytest.mark.parametrize("sparsity", [0.1, 0.3, 0.5, 0.9])
def test_cats_drops_the_same_share_in_every_layer(
    weights: Weights, statistics: GateStatistics, sparsity: float
) -> None:
    limits = cats.thresholds(quantiles_of(statistics), sparsity).limits
    for layer in range(3):
        size = gate_stats.silu_gate(weights.layers[layer], statistics.inputs[layer]).abs()
        # The sample is 64 of 464 positions; 152 channels each.
        assert float((size <= limits[layer]).double().mean()) == pytest.approx(sparsity, abs=0.03)


def test_the_histogram_counts_every_token_but_the_first_of_each_sequence(statistics: GateStatistics) -> None:
    assert statistics.tokens == 4 * (120 - gate_stats.SKIP)
    assert [gate.total for gate in statistics.gates] == [statistics.tokens * 152] * 3


def test_the_stream_does_not_depend_on_how_prefill_cuts_its_rows(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = token_ids(240, seed=5).view(2, 120)
    whole = gate_stats.collect(weights, tokens, rows=50)
    monkeypatch.setattr("artifact.engine.prefill.MLP_ROWS", 7)
    pieces = gate_stats.collect(weights, tokens, rows=50)
    assert torch.allclose(whole.inputs, pieces.inputs, atol=1e-5)
    assert [gate.total for gate in whole.gates] == [gate.total for gate in pieces.gates]
    assert whole.tokens_hash == pieces.tokens_hash


@given(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_a_reservoir_holds_distinct_positions_and_fills_up(rows: int, pieces: list[int]) -> None:
    reservoir, held, at = Reservoir(rows), torch.full((rows,), -1), 0
    for count in pieces:
        slots = reservoir.slots(count)
        given = slots[slots >= 0]
        assert len(given) == len(set(given.tolist()))
        held[given] = at + (slots >= 0).nonzero()[:, 0]
        at += count
    filled = held[held >= 0].tolist()
    assert len(filled) == min(rows, at) == len(set(filled)) and reservoir.seen == at


def test_a_reservoir_is_uniform_over_a_stream() -> None:
    """Every tenth of a stream of 1,000 positions is as likely to be kept as any other."""
    hits = np.zeros(10)
    for seed in range(200):
        reservoir, held = Reservoir(20, seed), torch.full((20,), -1)
        for start in range(0, 1000, 50):
            slots = reservoir.slots(50)
            held[slots[slots >= 0]] = start + (slots >= 0).nonzero()[:, 0]
        hits += np.bincount(held.numpy() // 100, minlength=10)
    # 400 expected in each; the standard deviation of a count is under 20.
    assert np.abs(hits - 400).max() < 80


def test_the_largest_admissible_threshold_counts_even_where_the_error_is_not_monotone() -> None:
    curves = curves_of([[0.0, 0.3, 0.1, 0.4], [0.0, 0.1, 0.2, 0.3]])
    assert curves.mask(0.2).limits.tolist() == [1.0, 1.0]
    assert curves.mask(0.05).limits.tolist() == [-1.0, -1.0]


def test_where_no_threshold_is_admissible_nothing_is_dropped() -> None:
    curves = curves_of([[0.0, 0.5, 0.6], [0.0, 0.1, 0.7]])
    assert curves.mask(0.2).limits.tolist() == [-1.0, 0.0]
    assert curves.sparsity(0.0) == 0.0
    with pytest.raises(UserError, match="negative"):
        curves.mask(-0.1)


def test_a_budget_equal_to_an_error_admits_it_and_ties_move_together() -> None:
    curves = curves_of([[0.0, 0.1, 0.2, 0.3], [0.0, 0.1, 0.2, 0.3]])
    assert curves.mask(0.2).limits.tolist() == [1.0, 1.0]
    assert curves.budget(0.25) == 0.1 and curves.budget(0.5) == 0.2
    # Halfway between S = 0.25 and S = 0.5: the smaller budget, never one that no error has.
    assert curves.budget(0.375) == 0.1


def test_on_a_plateau_the_smallest_of_equally_good_budgets_is_taken() -> None:
    curves = curves_of([[0.0, 0.1, 0.4, 0.9]], [[0.0, 0.5, 0.5, 0.5]])
    assert curves.budget(0.5) == 0.1
    assert curves.budget(0.99) == 0.1


tables = st.lists(
    st.lists(st.floats(0.0, 1.0).map(lambda e: round(e, 2)), min_size=6, max_size=6), min_size=1, max_size=5
)


@given(tables, st.floats(0.01, 1.0))
def test_the_budget_is_the_argmin_over_all_budgets(errors: list[list[float]], target: float) -> None:
    """Against every budget on a grid that holds all error values: equation 10 with its smallest argmin."""
    curves = curves_of([[0.0, *layer] for layer in errors])
    found = curves.budget(target)
    grid = sorted({0.0, *(value for layer in errors for value in layer)})
    distances = {budget: abs(curves.sparsity(budget) - target) for budget in grid}
    least = min(distances.values())
    assert distances[found] == pytest.approx(least, abs=1e-9)
    assert found == min(budget for budget, distance in distances.items() if distance <= least + 1e-9)


@given(tables, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_sparsity_grows_with_the_budget(errors: list[list[float]], one: float, other: float) -> None:
    curves = curves_of([[0.0, *layer] for layer in errors])
    assert curves.sparsity(min(one, other)) <= curves.sparsity(max(one, other)) + 1e-12


@pytest.mark.parametrize("target", [0.3, 0.5])
def test_curves_of_a_model_reach_the_target_within_the_budget(
    weights: Weights, statistics: GateStatistics, target: float
) -> None:
    curves = sats.curves(weights, statistics, (0.3, 0.5))
    budget = curves.budget(target)
    assert curves.sparsity(budget) == pytest.approx(target, abs=0.005)
    assert bool((curves.candidates[:, 1:] >= curves.candidates[:, :-1]).all())
    limits = curves.mask(budget).limits
    for layer in range(3):
        assert plain_errors(weights, layer, statistics.inputs[layer], [float(limits[layer])], sats.EPSILON)[0] <= (
            budget + 1e-4
        )


def test_denser_candidates_come_closer_to_every_layers_budget(weights: Weights, statistics: GateStatistics) -> None:
    coarse = sats.curves(weights, statistics, (0.5,), fine=1)
    dense = sats.curves(weights, statistics, (0.5,), fine=6)
    gaps = []
    for curves in (coarse, dense):
        budget = curves.budget(0.5)
        at = curves.admissible(budget)
        gaps.append(float((budget - curves.errors.gather(1, at[:, None])).mean()))
    assert gaps[1] < gaps[0]


def test_equal_activations_are_one_candidate_with_the_share_they_drop() -> None:
    gate = Magnitudes()
    gate.add(torch.cat((torch.zeros(80), torch.linspace(0.1, 1.0, 20))))
    asked = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    shares = gate_stats.shares_dropped(gate, gate.quantile(asked), asked)
    assert shares.tolist() == pytest.approx([0.8, 0.8, 0.9], abs=0.002)
    row = torch.stack((gate.quantile(asked).double(), torch.tensor([0.0, 0.0, 0.2], dtype=torch.float64), shares))
    table = sats._tabulate([row])
    assert table.candidates.shape == (1, 2) and table.shares[0, 0] == pytest.approx(0.8, abs=0.002)


def test_wrong_requests_are_one_sentence(weights: Weights, statistics: GateStatistics) -> None:
    with pytest.raises(UserError, match="above 0"):
        sats.curves(weights, statistics, (0.5,), epsilon=0.0)
    with pytest.raises(UserError, match=r"target sparsity is 1\.5"):
        curves_of([[0.0, 0.1]]).budget(1.5)
    with pytest.raises(UserError, match="drops every channel"):
        cats.thresholds(quantiles_of(statistics), 1.0)
    with pytest.raises(UserError, match="longer than 4 tokens"):
        gate_stats.collect(weights, [token_ids(3)])
