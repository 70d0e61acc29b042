"""The crossing claim on simulated step times: what it reproduces, and the faults that must turn it away."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from artifact import crossing
from artifact.account import K_TOKENS, Mode, Setting, n_star, step_bytes
from artifact.claim import Finding
from artifact.crossing_cells import Plan, sweep_group
from artifact.profiles import Profile
from artifact.shapes import known_shape
from artifact.stats import Verdict
from claims import crossover

SHAPE = known_shape("SmolLM2-135M")
PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
BANDWIDTH_GBPS = 20.0
Row = dict[str, Any]
Times = Callable[[float, float, int], float]


def honest(cost_p: float = 1.5, cost_kv: float = 0.3, dense_cost: float = 2.0) -> Times:
    """Step time in ms of a machine that reads at a fixed bandwidth and pays fixed kernel costs."""

    def ms(r_p: float, r_kv: float, n: int) -> float:
        setting = Setting(r_p, r_kv, weight_bits=32, kv_bits=32)
        mode = {(0, 0): Mode.DENSE, (1, 0): Mode.PROJECTION, (0, 1): Mode.KV, (1, 1): Mode.BOTH}[r_p < 1, r_kv < 1]
        cost = dense_cost + cost_p * (r_p < 1) + cost_kv * (r_kv < 1)
        return step_bytes(SHAPE, setting, n, mode) / BANDWIDTH_GBPS / 1e6 + cost

    return ms


def rows_of(times: Times, blocks: int = 5, noise: float = 0.004, seed: int = 0, spread: float = 0.12) -> list[Row]:
    """Rows as the cells store them: sweep rows at both ends, crossing rows around the true crossing of each pair."""
    rng = np.random.default_rng(seed)

    def row(cell: str, block: int, n: int, r_p: float, r_kv: float, pair: tuple[float, float] | None = None) -> Row:
        level = times(r_p, r_kv, n) * (1 + noise * rng.standard_t(4, size=40))
        mode = {(0, 0): "dense", (1, 0): "projection", (0, 1): "kv", (1, 1): "both"}[r_p < 1, r_kv < 1]
        return {
            "cell": f"block-{block}", "part": cell, "block": block, "pair": pair and list(pair),
            "context": n, "r_p": r_p, "r_kv": r_kv, "mode": mode,
            "ms": level.tolist(), "counted_r_p": r_p, "counted_r_kv": r_kv, "shape": dataclasses.asdict(SHAPE),
            "weight_bits": 32, "kv_bits": 32, "read_gbps": BANDWIDTH_GBPS, "projection_bytes": 1.0, "kv_bytes": 1.0,
            "head_bytes": 1.0, "origin": "live", "text": "simulated",
        }  # fmt: skip

    rows = []
    for block in range(blocks):
        swept = sweep_group(Plan("crossover", crossover.PAIRS, 50), 7936, "sweep")
        rows += [row("sweep", block, one["context"], one["r_p"], one["r_kv"]) for one in swept]
        for r_p, r_kv in crossover.PAIRS:
            star = n_star(SHAPE, Setting(r_p, r_kv, weight_bits=32, kv_bits=32))
            for share in (1 - spread, 1 - spread / 3, 1 + spread / 3, 1 + spread):
                n = int(0.87 * star * share)
                pair = (r_p, r_kv)
                rows += [row("crossing", block, n, *mode, pair) for mode in ((r_p, 1.0), (1.0, r_kv))]
    return rows


def verdicts(rows: list[Row]) -> dict[str, Verdict]:
    return {finding.predicate.name: finding.verdict for finding in crossover.judge(rows, PROFILE)}


def first(rows: list[Row]) -> Finding:
    return crossover.judge(rows, PROFILE)[0]


def test_an_honest_machine_reproduces_every_predicate() -> None:
    assert set(verdicts(rows_of(honest())).values()) == {Verdict.REPRODUCED}


def test_prediction_and_crossing_equal_the_closed_form_without_noise() -> None:
    rows = rows_of(honest(1.5, 0.3), blocks=1, noise=0.0)
    per_token = SHAPE.layers * SHAPE.kv_values_per_token * 4 / BANDWIDTH_GBPS / 1e6
    for r_p, r_kv in crossover.PAIRS:
        star = n_star(SHAPE, Setting(r_p, r_kv, weight_bits=32, kv_bits=32))
        expected = star - (1.5 - 0.3) / (per_token * (1 - r_kv))
        sweep = [row for row in rows if row["part"] == "sweep"]
        found = crossing.predict(sweep, r_p, r_kv, star)
        assert found.tokens == pytest.approx(expected, rel=1e-9)
        assert found.cost_p_ms == pytest.approx(1.5) and found.cost_kv_ms == pytest.approx(0.3)
        around = [row for row in rows if row["part"] == "crossing"]
        assert crossing.locate(around, r_p, r_kv) == pytest.approx(expected, rel=1e-9)


def test_the_region_is_a_share_of_the_models_own_crossover() -> None:
    finding = first(rows_of(honest()))
    star = n_star(SHAPE, Setting(0.5, 0.3, weight_bits=32, kv_bits=32))
    assert finding.predicate.region.high == pytest.approx(0.055 * star)
    assert finding.extra["n_star_tokens"] == pytest.approx(6582.857, abs=0.01)
    assert finding.extra["region_ms"] == pytest.approx(0.055 * star * float(finding.extra["slope_ms_per_k"]) / K_TOKENS)


def changed(change: Callable[[Row], None]) -> list[Row]:
    rows = rows_of(honest())
    for row in rows:
        change(row)
    return rows


def dense_posing_as_projection(row: Row) -> None:
    if row["mode"] == "projection":
        row["ms"] = [honest(0.0, 0.0)(1.0, 1.0, row["context"]) * (1 + 1e-3 * i) for i in range(40)]


def kv_ratio_ignored(row: Row) -> None:
    if row["mode"] == "kv":
        row["ms"] = [honest()(1.0, 1.0, row["context"]) + 0.3 + 1e-3 * i for i in range(40)]


def stale_cache(row: Row) -> None:
    """The KV mode of a crossing cell decodes on the cache of a 1K prompt, whatever its context."""
    if row["mode"] == "kv" and row["part"] == "crossing":
        row["ms"] = [honest()(1.0, row["r_kv"], 1024) + 1e-3 * i for i in range(40)]


def unsynchronised_timer(row: Row) -> None:
    """The clock stops before the work: sparse modes seem to take the launch time alone."""
    if row["mode"] != "dense":
        row["ms"] = [0.3 + 1e-3 * i for i in range(40)]


def swapped_timer(row: Row) -> None:
    """Samples of the two branches are stored under each other's name."""
    if row["mode"] in ("projection", "kv"):
        r_p, r_kv = (1.0, 0.3) if row["mode"] == "projection" else (0.5, 1.0)
        row["ms"] = [honest()(r_p, r_kv, row["context"]) + 1e-3 * i for i in range(40)]


def wrong_mask(row: Row) -> None:
    """The KV mode reads a window of half the entries it claims."""
    if row["mode"] == "kv" and row["part"] == "crossing":
        row["ms"] = [honest()(1.0, row["r_kv"] / 2, row["context"]) - 1.0 + 1e-3 * i for i in range(40)]


def wasteful_dense(row: Row) -> None:
    """Dense attention repeats KV heads: three times the cache bytes."""
    if row["mode"] == "dense":
        extra = 2 * SHAPE.layers * SHAPE.kv_values_per_token * 4 * row["context"] / BANDWIDTH_GBPS / 1e6
        row["ms"] = [value + extra for value in row["ms"]]


FAULTS = (
    dense_posing_as_projection,
    kv_ratio_ignored,
    stale_cache,
    unsynchronised_timer,
    swapped_timer,
    wrong_mask,
    wasteful_dense,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_seeded_faults_turn_the_claim_away_from_reproduced(fault: Callable[[Row], None]) -> None:
    found = verdicts(changed(fault))
    assert set(found.values()) != {Verdict.REPRODUCED}, found


def test_a_wasteful_baseline_is_contradicted_by_the_bound() -> None:
    assert verdicts(changed(wasteful_dense))["kv within its byte bound"] is Verdict.CONTRADICTED


def test_arms_of_unequal_length_are_an_error() -> None:
    rows = rows_of(honest())
    next(row for row in rows if row["mode"] == "kv")["ms"].pop()
    with pytest.raises(ValueError, match="samples"):
        crossover.judge(rows, PROFILE)


def test_a_crossing_that_is_not_bracketed_is_never_reproduced() -> None:
    finding = first(rows_of(honest(cost_p=4.0)))  # crosses more than 1,500 tokens below the measured contexts
    assert finding.interval is not None and math.isnan(finding.interval.point)
    assert finding.verdict is Verdict.INCONCLUSIVE and "did not bracket" in finding.note


def test_without_rows_nothing_is_reproduced() -> None:
    assert set(verdicts([]).values()) == {Verdict.NOT_RUN}


@pytest.mark.parametrize("predicted", [3000.0, 100.0, 1e9, 6000.0])
def test_contexts_around_a_prediction_lie_on_the_grid_and_differ(predicted: float) -> None:
    found = crossing.around(predicted, (0.82, 0.94, 1.06, 1.18), 256, 1280, 7680)
    assert len(found) >= 2 and all(n % 256 == 0 and 1280 <= n <= 7680 for n in found)


def test_a_pair_is_located_on_its_own_rows_alone() -> None:
    """Pairs share r_kv and may share a context: rows of another pair, of other rounds, must not be matched."""
    rows = rows_of(honest(), noise=0.0)
    strangers = [
        {**row, "pair": [0.6, 0.3], "ms": [value + 5.0 for value in row["ms"]]}
        for row in rows
        if row["pair"] == [0.5, 0.3] and row["mode"] == "kv"
    ]
    assert first(rows + strangers).extra["measured_tokens"] == first(rows).extra["measured_tokens"]


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
