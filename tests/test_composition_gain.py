"""The composition claim on made-up perplexities and step times, and the faults that must turn it away."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from artifact.judge import composition
from artifact.measure.quality_plan import grid
from artifact.profiles import Profile
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import composition_gain as claim
from paper_tables.contexts import table4
from tests.faults.composition_gain import (
    BLOCKS,
    PROFILE,
    Row,
    composition_does_not_retrieve,
    composition_pays,
    honest,
    one_slow_block,
    ratio_ignored,
    second_stage,
    timing,
)

PRINTED = ("composition.a100.low", "composition.a6000.high")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return honest()


def verdicts(rows: list[Row]) -> dict[str, Verdict]:
    return {finding.predicate.name: finding.verdict for finding in claim.judge(rows, PROFILE)}


def test_the_grid_has_at_least_the_papers_settings() -> None:
    labels = [arm.label for arm in grid()]
    assert len(set(labels)) == len(labels) >= 16
    assert {arm.kind for arm in grid()} == {"dense", "single", "composed"}


def test_a_machine_at_its_byte_bounds_is_reproduced(rows: list[Row]) -> None:
    found = claim.judge(rows, PROFILE)
    assert summarise(found) is Verdict.REPRODUCED
    extra = found[0].extra
    assert any(str(text).startswith("no composition") for text in extra.values()) is False
    assert len(extra) == len(claim.BUDGETS)


def test_a_budget_without_composition_is_printed_and_counts_nowhere(rows: list[Row]) -> None:
    changed = copy.deepcopy(rows)
    for row in changed:
        if row.get("kind") == "window" and row["r_p"] < 1:
            row["nll"] = [value + 0.03 for value in row["nll"]]
    changed = [row for row in changed if row["cell"] in ("windows-0", "screen-0")]
    changed += second_stage(changed)
    found = claim.judge(changed, PROFILE)
    assert str(found[0].extra["within 1.6%"]).startswith("no composition")
    assert found[1].verdict is Verdict.REPRODUCED


@pytest.mark.parametrize(
    ("fault", "predicate"),
    [
        (composition_pays, "composition is fastest"),
        (composition_pays, "gain of the composition"),
        (one_slow_block, "gain in every block"),
        (one_slow_block, "gain where the selection is affordable"),
        (ratio_ignored, "gain of the composition"),
    ],
)
def test_a_fault_turns_the_claim_away(rows: list[Row], fault: Callable[[list[Row]], None], predicate: str) -> None:
    changed = copy.deepcopy(rows)
    fault(changed)
    found = verdicts(changed)
    assert found[predicate] in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)


def test_retrieval_of_a_selected_composition_that_fails_is_seen(rows: list[Row]) -> None:
    changed = copy.deepcopy(rows)
    composition_does_not_retrieve(changed)
    found = {finding.predicate.name: finding for finding in claim.judge(changed, PROFILE)}
    assert found["selected configurations retrieve"].verdict is Verdict.CONTRADICTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.remove(next(r for r in rows if r.get("kind") == "window" and r["window"] == 3)), "windows"),
        (lambda rows: next(r for r in rows if r["cell"] == "block-1" and r["r_p"] < 1)["ms"].pop(), "samples"),
        (lambda rows: rows.remove(next(r for r in rows if r["cell"] == "screen-0" and r["r_p"] == 0.5)), "only one"),
        (lambda rows: next(r for r in rows if r.get("kind") == "window")["nll"].pop(), "other tokens"),
    ],
)
def test_unequal_arms_are_errors(rows: list[Row], change: Callable[[list[Row]], object], message: str) -> None:
    changed = copy.deepcopy(rows)
    change(changed)
    with pytest.raises(ValueError, match=message):
        claim.judge(changed, PROFILE)


def test_the_screen_never_decides_a_gain(rows: list[Row]) -> None:
    """A lucky screen changes what is picked, not what the blocks say about it."""
    changed = copy.deepcopy(rows)
    before = claim.judge(changed, PROFILE)[1].interval
    for row in changed:
        if row["cell"] == "screen-0":
            row["ms"] = [value * 0.5 for value in row["ms"]]
    assert claim.judge(changed, PROFILE)[1].interval == before


def test_on_a_small_model_the_tight_budgets_are_observed_and_the_wide_one_is_asserted(rows: list[Row]) -> None:
    embedded = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
    found = {finding.predicate.name: finding.verdict for finding in claim.judge(rows, embedded)}
    assert found["gain of the composition"] is found["gain in every block"] is Verdict.OBSERVED
    assert found["composition is fastest"] is found["gain where the selection is affordable"] is Verdict.REPRODUCED


def test_noise_of_one_block_cannot_contradict_a_gain(rows: list[Row]) -> None:
    """A minimum without an interval did, in a quick run of three blocks."""
    one_slow_block(rows)
    found = {finding.predicate.name: finding for finding in claim.judge(rows, PROFILE)}
    affordable = found["gain where the selection is affordable"]
    assert affordable.verdict is Verdict.INCONCLUSIVE
    assert affordable.extra["smallest of 5 blocks"] < claim.LEAST_GAIN


def synthetic() -> list[Row]:
    """Rows of a run on made-up weights: the paper's admissions, a screen and blocks at the byte bounds."""
    rows: list[Row] = [{**row, "cell": "admitted", "block": 0, "origin": "live"} for row in claim.published_rows()]
    rows += timing("screen", 0, [arm.label for arm in grid()], 2)
    names = composition.to_retime(claim.picked(rows))
    rows += [row for block in range(BLOCKS) for row in timing("block", block, names, 10 + block)]
    return [{"text": "synthetic", **row} for row in rows]


def test_without_trained_weights_budgets_admit_what_the_papers_perplexities_do() -> None:
    """Section 5.3: each composition pairs the smallest KV keep ratio with the most projection sparsity admitted."""
    picks = claim.picked(synthetic())
    assert [pick.composed for pick in picks] == [None, "p70+kv20", "p60+kv20", "p50+kv20"]
    assert {pick.single for pick in picks} <= {arm.label for arm in grid() if arm.kind == "single"}
    assert picks[0].fastest == picks[0].single == "kv20"


def test_without_trained_weights_timing_is_judged_and_retrieval_says_it_did_not_run() -> None:
    gpu = Profile("gpu", "llama-3.1-8b", "cuda", "float16", None, 2)
    found = {finding.predicate.name: finding for finding in claim.judge(synthetic(), gpu)}
    assert found["selected configurations retrieve"].verdict is Verdict.NOT_RUN
    assert found["composition is fastest"].verdict is Verdict.REPRODUCED
    slow = synthetic()
    composition_pays(slow)
    found = {finding.predicate.name: finding for finding in claim.judge(slow, gpu)}
    assert found["composition is fastest"].verdict is not Verdict.REPRODUCED


def test_table_4_marks_the_papers_admissions_as_the_papers() -> None:
    paper = {"crossover": {"figures": {key: {"printed": "14"} for key in PRINTED}}}
    rows = table4.context(synthetic(), {}, paper)["rows"]
    assert [row["cells"][1] for row in rows[:1]] and len(rows) == len(claim.PAPER_BUDGETS)
    change = rows[1]["cells"][5]
    assert (change.text, change.origin) == ("within 0.2 PPL", "paper")
