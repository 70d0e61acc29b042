"""The composition claim on made-up perplexities and step times, and the faults that must turn it away."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from artifact import composition
from artifact.account import Mode, Setting, step_bytes
from artifact.profiles import Profile
from artifact.quality_plan import grid
from artifact.shapes import known_shape
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import composition_gain as claim

PROFILE = Profile("paper", "model", "cpu", "float32", None, 2)
SHAPE = known_shape("SmolLM2-135M")
CONTEXT, BLOCKS, STEPS = 4096, 5, 20
Row = dict[str, Any]


def cost(r_p: float, r_kv: float) -> float:
    """Extra nats of a setting: projection costs as in the paper's sweep, the selection nearly nothing."""
    return 0.02 * ((1 - r_p) / 0.3) ** 2 + 0.002 * (1 - r_kv)


def step_ms(r_p: float, r_kv: float) -> float:
    mode = {(0, 0): Mode.DENSE, (1, 0): Mode.PROJECTION, (0, 1): Mode.KV, (1, 1): Mode.BOTH}[r_p < 1, r_kv < 1]
    return step_bytes(SHAPE, Setting(r_p, r_kv, weight_bits=32, kv_bits=32), CONTEXT, mode) / 20e6


def timing(cell: str, block: int, names: list[str], seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    arms = {arm.label: arm for arm in grid()}
    others = [name for name in names if name != "dense"]
    rows = []
    for start in range(0, len(others), claim.GROUP):
        for name in ["dense", *others[start : start + claim.GROUP]]:
            arm = arms[name]
            ms = step_ms(arm.r_p, arm.r_kv) * (1 + 0.01 * rng.standard_normal(STEPS))
            method = "none" if arm.method == "full" else arm.method
            rows.append({
                "cell": f"{cell}-{block}", "block": block, "r_p": arm.r_p, "r_kv": arm.r_kv, "method": method,
                "ms": ms.tolist(), "origin": "live",
            })  # fmt: skip
    return rows


def honest() -> list[Row]:
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    for window in range(8):
        level = 2.7 + 0.2 * rng.standard_normal()
        for arm in grid():
            nll = level + cost(arm.r_p, arm.r_kv) + 1e-4 * rng.standard_normal()
            rows.append({
                **arm.record(), "cell": "windows-0", "block": 0, "kind": "window", "window": window, "protocol": "p",
                "window_tokens_hash": f"w{window}", "nll": [nll] * 4, "origin": "live", "text": "simulated",
            })  # fmt: skip
    rows += timing("screen", 0, [arm.label for arm in grid()], 2)
    return rows + second_stage(rows)


def second_stage(first: list[Row]) -> list[Row]:
    """Blocks and answers of what the first stage picks."""
    names = composition.to_retime(claim.picked(first))
    rows = [row for block in range(BLOCKS) for row in timing("block", block, names, 10 + block)]
    for arm in grid():
        if arm.label in names:
            for placement in range(20):
                rows.append({
                    **arm.record(), "cell": "retrieval", "block": 0, "kind": "answer", "prompt_id": str(placement),
                    "turn": 1, "outcome": "right",
                })  # fmt: skip
    return rows


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


def composition_pays(rows: list[Row]) -> None:
    """A composition that runs as slowly as its slower half."""
    for row in rows:
        if "ms" in row and row["cell"] != "screen-0" and row["r_p"] < 1 and row["r_kv"] < 1:
            row["ms"] = [value * 1.9 for value in row["ms"]]


def one_slow_block(rows: list[Row]) -> None:
    for row in rows:
        if row["cell"] == "block-3" and row["r_p"] < 1 and row["r_kv"] < 1:
            row["ms"] = [value * 1.5 for value in row["ms"]]


def ratio_ignored(rows: list[Row]) -> None:
    """Compositions whose projection branch ran dense."""
    for row in rows:
        if "ms" in row and row["cell"] != "screen-0" and row["r_p"] < 1 and row["r_kv"] < 1:
            row["ms"] = [step_ms(1.0, row["r_kv"])] * STEPS


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
    for row in changed:
        if row.get("kind") == "answer" and "+" in row["label"]:
            row["outcome"] = "distractor"
    found = {finding.predicate.name: finding for finding in claim.judge(changed, PROFILE)}
    assert found["selected configurations retrieve"].verdict is Verdict.CONTRADICTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.remove(next(r for r in rows if r.get("kind") == "window" and r["window"] == 3)), "windows"),
        (lambda rows: next(r for r in rows if r["cell"] == "block-1" and r["r_p"] < 1)["ms"].pop(), "unequal"),
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
