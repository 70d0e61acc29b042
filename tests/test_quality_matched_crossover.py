"""The quality-matched crossover on made-up sweeps, against the paper's own arithmetic, and its seeded faults."""

from __future__ import annotations

import copy
import math

import pytest

from artifact.account import Setting, n_star
from artifact.judge import matched
from artifact.measure.quality_plan import singles
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import quality_matched_crossover as claim
from tests.faults.quality_matched_crossover import (
    PROFILE,
    PROJECTION,
    SELECTION,
    SHAPE,
    paper_rows,
    projection_ran_dense,
    rows_of,
)


def test_the_papers_sweep_gives_the_papers_crossovers() -> None:
    found = {finding.predicate.name: finding for finding in claim.judge(paper_rows(), PROFILE)}
    for size, printed in (("0.2", 35.7), ("0.5", 48.1), ("1.0", 57.8)):
        finding = found[f"earlier at {claim.BUDGETS[size]:.1%}"]
        assert float(finding.extra["n_star_tokens"]) / 1024 == pytest.approx(printed, abs=0.15)
        assert finding.extra["r_kv"] == 0.1
    assert summarise(list(found.values())) is Verdict.REPRODUCED


def test_a_selection_that_costs_as_much_as_the_projection_is_not_earlier() -> None:
    """At equal cost per keep ratio, 7 of 10 entries must stay where half the weights may go."""
    costly = {keep: 0.3 * (1 - keep) for keep in (0.9, 0.8, 0.7, 0.5, 0.3, 0.1)}
    cheap = {keep: 0.03 * (1 - keep) for keep in (0.9, 0.7, 0.6, 0.5)}
    found = claim.judge(rows_of(cheap, costly), PROFILE)
    assert found[0].verdict is Verdict.CONTRADICTED


def test_noise_as_large_as_the_effect_is_inconclusive() -> None:
    flat = {keep: 0.02 + 0.3 * (1 - keep) for keep in (0.7, 0.5, 0.3)}
    steep = {keep: 0.5 * (1 - keep) for keep in (0.7, 0.6, 0.5)}
    found = claim.judge(rows_of(steep, flat, noise=0.15), PROFILE)
    assert Verdict.INCONCLUSIVE in {finding.verdict for finding in found}


def test_a_selection_that_never_meets_the_budget_gives_no_number() -> None:
    found = claim.judge(rows_of(PROJECTION | {0.7: 0.01, 0.6: 0.02}, {0.5: 5.0, 0.3: 6.0}, 1e-6), PROFILE)
    finding = found[0]
    assert finding.verdict is not Verdict.REPRODUCED


def test_ignored_keep_ratios_turn_the_claim_away() -> None:
    """A projection branch that ran dense costs nothing at any ratio: the steps between ratios vanish."""
    found = claim.judge(rows_of({0.7: 0.0, 0.6: 0.0, 0.5: 0.0}, SELECTION, 1e-4), PROFILE)
    assert found[-1].verdict in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)
    exactly = paper_rows()
    projection_ran_dense(exactly)
    assert claim.judge(exactly, PROFILE)[-1].verdict is Verdict.CONTRADICTED


def test_unequal_arms_are_errors() -> None:
    rows = copy.deepcopy(paper_rows())
    rows.remove(next(row for row in rows if row.get("label") == "kv20"))
    with pytest.raises(ValueError, match="windows"):
        claim.judge(rows, PROFILE)


def test_interpolation_by_hand_and_no_extrapolation() -> None:
    sweep = matched.Sweep.of(rows_of({0.8: 0.1, 0.6: 0.2}, {0.5: 0.0}, 0.0)[1:])
    middle = math.expm1(0.5 * (math.log(1.1) + math.log(1.2)))
    assert sweep.keeps(middle)[0] == pytest.approx(0.7)
    assert sweep.keeps(0.9) == (pytest.approx(0.6), 0.5)
    assert sweep.keeps(0.05)[0] == pytest.approx(1 - 0.2 * math.log(1.05) / math.log(1.1))


def test_points_of_the_figure_cover_both_branches() -> None:
    points = claim.figure_points(paper_rows())
    assert {point["branch"] for point in points} == {"projection", "selection"}
    assert all(point["low"] <= point["point"] <= point["high"] for point in points)
    assert len(points) == 2 + 5 + 3


def test_the_sweep_of_the_plan_holds_what_the_claim_needs() -> None:
    keeps = {arm.r_p for arm in singles()}
    assert {0.7, 0.6, 0.5} <= keeps
    assert n_star(SHAPE, Setting(0.5, 0.3)) > n_star(SHAPE, Setting(0.691, 0.1))
