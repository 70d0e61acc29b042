"""The crossing claim on simulated step times: what it reproduces, and the faults that must turn it away."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from artifact.account import K_TOKENS, Setting, n_star
from artifact.claim import Finding
from artifact.engine.memory_plan import Fit
from artifact.judge import crossing
from artifact.judge.levels import with_levels
from artifact.measure.crossing_cells import (
    FRESH_BLOCKS,
    SHORTEST_TOKENS,
    Plan,
    block_cell,
    crossing_contexts,
    crossing_group,
    sweep_group,
)
from artifact.profiles import Profile
from artifact.stats import Verdict
from claims import crossover
from tests.faults.crossover import (
    BANDWIDTH_GBPS,
    FAULTS,
    PROFILE,
    SHAPE,
    UNEQUAL,
    Row,
    machine,
    rows_of,
    wasteful_dense,
)


def verdicts(rows: list[Row]) -> dict[str, Verdict]:
    return {finding.predicate.name: finding.verdict for finding in crossover.judge(rows, PROFILE)}


def first(rows: list[Row]) -> Finding:
    return crossover.judge(rows, PROFILE)[0]


def test_an_honest_machine_reproduces_every_predicate() -> None:
    assert set(verdicts(rows_of(machine())).values()) == {Verdict.REPRODUCED}


def test_prediction_and_crossing_equal_the_closed_form_without_noise() -> None:
    rows = rows_of(machine(1.5, 0.3), blocks=1, noise=0.0)
    per_token = SHAPE.layers * SHAPE.kv_values_per_token * 4 / BANDWIDTH_GBPS / 1e6
    for r_p, r_kv in crossover.PAIRS:
        star = n_star(SHAPE, Setting(r_p, r_kv, weight_bits=32, kv_bits=32))
        expected = star - (1.5 - 0.3) / (per_token * (1 - r_kv))
        sweep = [row for row in rows if row["part"] == "sweep"]
        found = crossing.predict(with_levels(sweep), r_p, r_kv, star)
        assert found.tokens == pytest.approx(expected, rel=1e-9)
        assert found.cost_p_ms == pytest.approx(1.5) and found.cost_kv_ms == pytest.approx(0.3)
        around = with_levels([row for row in rows if row["part"] == "crossing"])
        assert crossing.locate(around, r_p, r_kv) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("costs", "said"),
    [((1.5, 9.0), "past 7,936 (the model's window: 8,192)"), ((12.0, 0.3), "below the shortest context")],
)
def test_a_crossing_outside_the_window_is_said_to_be_there(costs: tuple[float, float], said: str) -> None:
    finding = first(rows_of(machine(*costs)))
    assert finding.verdict is Verdict.INCONCLUSIVE and said in finding.note


def test_a_window_that_ends_before_the_byte_crossover_is_judged_by_who_leads_there() -> None:
    """Mistral-7B, Qwen3-8B and 70B models: no crossing within the window, as the account says."""
    found = {finding.predicate.name: finding for finding in crossover.judge(rows_of(machine(), longest=3072), PROFILE)}
    assert found["crossing at 50% / 30%"].verdict is Verdict.OBSERVED
    last = found["the predicted branch leads at the longest context"]
    assert last.verdict is Verdict.REPRODUCED and last.extra["predicted_leader"] == "projection"

    def kv_ahead(r_p: float, r_kv: float, n: float) -> float:  # against its own dense slope and costs
        return machine()(r_p, r_kv, n) * (0.5 if (r_p, r_kv, n) == (1.0, 0.3, 3072) else 1.0)

    rows = rows_of(kv_ahead, longest=3072)
    late = {finding.predicate.name: finding for finding in crossover.judge(rows, PROFILE)}
    assert late["the predicted branch leads at the longest context"].verdict is not Verdict.REPRODUCED


@pytest.mark.parametrize("cost_ms", [0.3, 1.5, 2.5, 3.5])
def test_contexts_reach_past_the_region_however_far_costs_push_the_crossing(cost_ms: float) -> None:
    rows = with_levels([row for row in rows_of(machine(cost_ms, 0.3), blocks=1, noise=0.0) if row["part"] == "sweep"])
    contexts = crossing_contexts(rows, Plan(crossover.NAME, crossover.PAIRS, 10), SHAPE, 8192)
    for pair, found in contexts.items():
        star = n_star(SHAPE, Setting(*pair, weight_bits=32, kv_bits=32))
        expected, region = crossing.predict(rows, *pair, star).tokens, crossover.REGION_SHARE * star
        assert found[-1] - found[0] >= 2 * region
        if expected - region > SHORTEST_TOKENS + 256:
            assert found[0] <= expected - region + 256 and expected + region - 256 <= found[-1]


def test_the_region_is_a_share_of_the_models_own_crossover() -> None:
    finding = first(rows_of(machine()))
    star = n_star(SHAPE, Setting(0.5, 0.3, weight_bits=32, kv_bits=32))
    assert finding.predicate.region.high == pytest.approx(0.055 * star)
    assert finding.extra["n_star_tokens"] == pytest.approx(6582.857, abs=0.01)
    assert finding.extra["region_ms"] == pytest.approx(0.055 * star * float(finding.extra["slope_ms_per_k"]) / K_TOKENS)
    assert finding.interval is not None
    low, high = (float(finding.extra[f"bootstrap_{end}_tokens"]) for end in ("low", "high"))
    assert finding.interval.low <= low <= finding.interval.point <= high <= finding.interval.high


def changed(fault: Callable[[list[Row]], None]) -> list[Row]:
    rows = rows_of(machine())
    fault(rows)
    return rows


@pytest.mark.parametrize("fault", [one for one in FAULTS if one is not UNEQUAL], ids=lambda fault: fault.__name__)
def test_seeded_faults_turn_the_claim_away_from_reproduced(fault: Callable[[list[Row]], None]) -> None:
    found = verdicts(changed(fault))
    assert set(found.values()) != {Verdict.REPRODUCED}, found


def test_a_wasteful_baseline_is_contradicted_by_the_bound() -> None:
    assert verdicts(changed(wasteful_dense))["kv within its byte bound"] is Verdict.CONTRADICTED


def test_arms_of_unequal_length_are_an_error() -> None:
    rows = rows_of(machine())
    next(row for row in rows if row["mode"] == "kv")["ms"].pop()
    with pytest.raises(ValueError, match="samples"):
        crossover.judge(rows, PROFILE)


def test_a_crossing_that_is_not_bracketed_is_never_reproduced() -> None:
    finding = first(rows_of(machine(cost_p=4.0)))  # crosses more than 1,500 tokens below the measured contexts
    assert finding.interval is not None and math.isnan(finding.interval.point)
    assert finding.verdict is Verdict.INCONCLUSIVE and "did not bracket" in finding.note


def test_without_rows_nothing_is_reproduced() -> None:
    assert set(verdicts([]).values()) == {Verdict.NOT_RUN}


@pytest.mark.parametrize("predicted", [3000.0, 100.0, 1e9, 6000.0])
def test_contexts_around_a_prediction_lie_on_the_grid_and_differ(predicted: float) -> None:
    found = crossing.around(predicted, (0.82, 0.94, 1.06, 1.18), 256, 1280, 7680)
    assert len(found) >= 2 and all(n % 256 == 0 and 1280 <= n <= 7680 for n in found)


def test_at_least_three_blocks_start_a_fresh_interpreter() -> None:
    profile = Profile("embedded", "smollm2-135m", "cpu", "float32", None, 2)
    plan, contexts = (
        Plan("crossover", crossover.PAIRS, crossover.STEPS),
        {pair: [2048, 4096] for pair in crossover.PAIRS},
    )
    cells = [block_cell(profile, plan, Fit(7936, ""), block, contexts) for block in range(crossover.BLOCKS)]
    assert [cell.fresh for cell in cells] == [True] * FRESH_BLOCKS + [False] * (crossover.BLOCKS - FRESH_BLOCKS)
    assert FRESH_BLOCKS >= 3 and len({cell.params["order_seed"] for cell in cells}) == crossover.BLOCKS


def test_members_that_several_pairs_need_are_measured_once() -> None:
    plan = Plan("crossover", crossover.PAIRS, 50)
    group = crossing_group(plan, {(0.5, 0.3): [3072, 5888], (0.6, 0.3): [2304, 4352], (0.6, 0.2): [2304, 4352]})
    settings = [(one["context"], one["r_p"], one["r_kv"]) for one in group]
    assert len(set(settings)) == len(settings) == 10
    for r_p, r_kv in crossover.PAIRS[1:]:
        assert {(n, *mode) for n in (2304, 4352) for mode in ((r_p, 1.0), (1.0, r_kv))} <= set(settings)


def test_a_quick_run_judges_the_pair_it_measured_and_leaves_the_others_out() -> None:
    swept = {(one["r_p"], one["r_kv"]) for one in sweep_group(Plan("crossover", crossover.QUICK_PAIRS, 8), 7936, "")}
    rows = [row for row in rows_of(machine()) if (row["r_p"], row["r_kv"]) in swept]
    found = verdicts(rows)
    left_out = {name for name, verdict in found.items() if verdict is Verdict.OBSERVED}
    assert left_out == {"crossing at 60% / 30%", "crossing at 60% / 20%", "order of crossings"}
    assert {verdict for name, verdict in found.items() if name not in left_out} == {Verdict.REPRODUCED}


def test_every_mode_is_swept_at_two_contexts_and_dense_wherever_a_mode_is() -> None:
    swept = sweep_group(Plan("crossover", crossover.PAIRS, 50), 7936, "sweep")
    contexts: dict[tuple[float, float], set[int]] = {}
    for one in swept:
        contexts.setdefault((one["r_p"], one["r_kv"]), set()).add(one["context"])
    assert len(swept) == 12
    for r_p, r_kv in crossover.PAIRS:
        assert len(contexts[r_p, 1.0]) == 2 and len(contexts[1.0, r_kv]) == 2
    assert set().union(*contexts.values()) == contexts[1.0, 1.0]
    assert contexts[0.5, 1.0] == contexts[1.0, 0.3] == {1024, 7936}
