"""The CateKV and SparK claims on made-up rows: what they reproduce, and the faults that must turn them away."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from artifact.account import Setting, n_star
from artifact.claim import Finding
from artifact.judge import kv_judge, which_sparsity
from artifact.shapes import known_shape
from artifact.stats import Verdict
from claims import catekv_accuracy, catekv_efficiency, spark_quality, spark_storage
from paper_tables.figures import FOLDER
from paper_tables.render import TableMissing, render
from tests.faults._kv import (
    CATEKV,
    EMBEDDED,
    PAPER_PROFILE,
    SPARK,
    answers,
    catekv_rows,
    efficiency_rows,
    storage_rows,
    timing,
    windows,
)

PAPER = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in ("catekv", "spark")}
Row = dict[str, Any]


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.predicate.name: finding.verdict for finding in findings}


@pytest.mark.parametrize(
    ("claim", "rows"),
    [
        (catekv_accuracy, catekv_rows),
        (spark_quality, lambda: windows(SPARK)),
        (catekv_efficiency, efficiency_rows),
        (spark_storage, storage_rows),
    ],
)
def test_what_the_papers_describe_is_reproduced(claim: Any, rows: Callable[[], list[Row]]) -> None:
    for profile in (EMBEDDED, PAPER_PROFILE):
        found = verdicts(claim.judge(rows(), profile))
        asserted = {p.name for p in claim.CLAIM.predicates if profile.name in p.asserted_in}
        assert set(found) == {p.name for p in claim.CLAIM.predicates}
        assert {name for name, verdict in found.items() if verdict is Verdict.REPRODUCED} == asserted
        assert {found[name] for name in set(found) - asserted} <= {Verdict.OBSERVED}


def damaged(rows: list[Row], change: Callable[[Row], Row | None]) -> list[Row]:
    return [new for row in copy.deepcopy(rows) if (new := change(row)) is not None]


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("head types matter", {**CATEKV, "random heads": 0.0}),
        ("reversed head types", {**CATEKV, "reversed heads": -0.1}),
        ("better than SnapKV", {**CATEKV, "snapkv": 0.0}),
    ],
)
def test_heads_that_do_not_matter_contradict(name: str, costs: dict[str, float]) -> None:
    found = verdicts(catekv_accuracy.judge([*windows(costs), *answers()], PAPER_PROFILE))
    assert found[name] is Verdict.CONTRADICTED


def test_lost_needles_are_counted_and_an_arm_may_not_skip_one() -> None:
    def lose(row: Row) -> Row:
        lost = row["label"] == "catekv" and row["test"] == "multikey"
        return row | ({"score": 0.0, "outcome": "wrong"} if lost else {})

    rows = [*windows(CATEKV), *damaged(answers(), lose)]
    assert verdicts(catekv_accuracy.judge(rows, EMBEDDED))["needle grid"] is Verdict.CONTRADICTED
    short = damaged(
        catekv_rows(), lambda row: None if (row["label"], row.get("prompt_id")) == ("catekv", "passkey1") else row
    )
    with pytest.raises(ValueError, match="arms answered different prompts"):
        catekv_accuracy.judge(short, EMBEDDED)
    with pytest.raises(ValueError, match="answered prompt passkey0 twice"):
        kv_judge.answers_of([*answers(), answers()[0]], ("passkey",))


def test_a_model_that_answers_nothing_proves_nothing() -> None:
    rows = [*windows(CATEKV), *damaged(answers(), lambda row: row | {"score": 0.0, "outcome": "wrong"})]
    found = verdicts(catekv_accuracy.judge(rows, EMBEDDED))
    assert found["dense answers"] is Verdict.CONTRADICTED and found["needle grid"] is Verdict.NOT_RUN
    assert set(verdicts(spark_quality.judge([], EMBEDDED)).values()) == {Verdict.NOT_RUN}


def test_a_head_too_many_contradicts_the_entries_and_slow_steps_the_gain() -> None:
    account = [row for row in efficiency_rows() if row["kind"] != "timing"]
    more = verdicts(catekv_efficiency.judge([*account, *timing(extra_entries=1)], EMBEDDED))
    assert more["entries kept"] is Verdict.CONTRADICTED
    assert verdicts(catekv_efficiency.judge([*account, *timing(0.9)], EMBEDDED))["decode step"] is Verdict.CONTRADICTED
    padded = damaged(timing(), lambda row: row | {"storage_bytes": 512 * 90 * 7936})
    assert verdicts(catekv_efficiency.judge([*account, *padded], EMBEDDED))["memory"] is Verdict.CONTRADICTED
    half = [*account, *(row for row in timing() if row["label"] == "dense")]
    assert verdicts(catekv_efficiency.judge(half, EMBEDDED))["decode step"] is Verdict.NOT_RUN


def test_the_account_of_the_headline() -> None:
    row = catekv_efficiency.account_row(known_shape("llama-3.1-8b"))
    assert row["share"] == pytest.approx(0.409375) and row["memory_bound"] == pytest.approx(2.4427, abs=1e-4)
    assert 0.4 * row["headline_eta"] + 0.6 * 2048 / 131072 == pytest.approx(1 / 2.72)


def test_a_forgotten_mask_contradicts_the_storage() -> None:
    rows = damaged(
        storage_rows(), lambda row: row | ({"stored_bytes": row["stored_bytes"] - 16} if row["kind"] == "key" else {})
    )
    assert verdicts(spark_storage.judge(rows, EMBEDDED))["bytes per key"] is Verdict.CONTRADICTED
    little = damaged(
        storage_rows(), lambda row: row | ({"kept_share": 0.25} if row.get("label") == "snapkv+spark80" else {})
    )
    assert verdicts(spark_storage.judge(little, EMBEDDED))["saved on top of SnapKV"] is Verdict.CONTRADICTED


def test_slower_steps_are_said_to_be_smaller_only() -> None:
    found = {finding.predicate.name: finding for finding in spark_storage.judge(storage_rows(), EMBEDDED)}
    assert found["step at 80%"].extra["what it is"] == "smaller only"


def test_simulated_recovery_is_named_and_has_no_bytes() -> None:
    rows = windows(SPARK)
    found = {finding.predicate.name: finding for finding in spark_quality.judge(rows, EMBEDDED)}
    assert "simulated" in str(found["loss at 80% with sampled recovery"].extra["note"])
    assert "note" not in found["loss at 80%"].extra
    line = next(line for line in render("spark_quality", rows, {}, PAPER).splitlines() if "sampled" in line)
    assert "simulated" in line and "44.0" not in line


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("catekv_accuracy", catekv_rows, "19/20"),
        ("catekv_needles", catekv_rows, "4 (4) of 5"),
        ("catekv_efficiency", efficiency_rows, "2.44x"),
        ("which_sparsity", efficiency_rows, "74.3K"),
        ("spark_quality", lambda: windows(SPARK), "32.38"),
        ("spark_storage", storage_rows, "83 of 256"),
    ],
)
def test_tables_are_derived_from_rows(name: str, rows: Callable[[], list[Row]], expected: str) -> None:
    assert expected in render(name, rows(), {}, PAPER)
    with pytest.raises(TableMissing):
        render(name, [], {}, PAPER)


def test_crossovers_of_methods_are_those_of_the_account() -> None:
    shape = known_shape("llama-3.1-8b")
    found = {row["name"]: row for row in which_sparsity.rows(shape)}
    assert found["SnapKV 30%"]["crossover_tokens"] == pytest.approx(n_star(shape, Setting(0.5, 0.3)), abs=1)
    catekv = found["CateKV r = 0.4"]["crossover_tokens"]
    saved = 0.6 * (catekv - 2048) * 2 * shape.kv_heads * shape.head_dim
    assert saved == pytest.approx(shape.projection_params * 0.5, rel=1e-3)
    assert found["TEAL 50%"]["bounds"]["131072"] == pytest.approx(1.277, abs=1e-3)
    never = which_sparsity.Method("x", "spark", "cache", lambda n: 0.0, True, "")
    assert which_sparsity.crossover_tokens(never, 1.0) == math.inf


def test_arms_of_two_protocols_are_compared_within_their_own() -> None:
    """Stepwise arms have windows of their own; dense is in both, and no window is mixed up with another's."""
    paged = damaged(windows({"dense": 0.1, "quest": 0.2, "catekv+quest": 0.25}), lambda row: row | {"protocol": "q"})
    plain = windows({name: cost for name, cost in CATEKV.items() if "quest" not in name})
    found = {f.predicate.name: f for f in catekv_accuracy.judge([*plain, *paged, *answers()], EMBEDDED)}
    quest, snapkv = found["with Quest on adaptive heads"].interval, found["better than SnapKV"].interval
    assert quest is not None and quest.point == pytest.approx(math.exp(0.05), abs=0.01)
    assert snapkv is not None and snapkv.point == pytest.approx(math.exp(0.03), abs=0.01)
    text = render("catekv_accuracy", [*plain, *paged, *answers()], {}, PAPER)
    assert text.count("dense &") == 1 and "catekv+quest &" in text
