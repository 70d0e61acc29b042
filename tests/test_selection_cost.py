"""The selection-cost claim on made-up times: what it reproduces, and its seeded faults."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from artifact.profiles import Profile
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import selection_cost as claim

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
Row = dict[str, Any]


def honest() -> list[Row]:
    """One pass costs 60 ms per 1K tokens and saves 1.2 ms per 1K tokens and step: repaid after 50 tokens."""
    rows = []
    for block in range(4):
        for context in (2048, 4096, 7680):
            k, drift = context / 1024, 1 + 0.01 * block
            rows.append({
                "cell": f"select-{block}", "block": block, "kind": "selection", "context": context, "r_kv": 0.3,
                "once_ms": [60 * k * drift] * 4, "first_ms": 300.0, "dense_ms": [20 + 1.7 * k] * 12,
                "kv_ms": [20 + 0.5 * k] * 12,
            })  # fmt: skip
    return rows


def verdicts(rows: list[Row]) -> list[Verdict]:
    return [finding.verdict for finding in claim.judge(rows, PROFILE)]


def test_repaid_tokens_by_hand() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert findings[0].interval is not None
    assert findings[0].interval.point == pytest.approx(50 * 1.015)
    assert summarise(findings) is Verdict.REPRODUCED
    assert findings[1].verdict is Verdict.OBSERVED


def slow_selection(rows: list[Row]) -> None:
    for row in rows:
        row["once_ms"] = [value * 10 for value in row["once_ms"]]


def nothing_saved(rows: list[Row]) -> None:
    """A KV mode that silently ran dense."""
    for row in rows:
        row["kv_ms"] = list(row["dense_ms"])


def one_length_slow(rows: list[Row]) -> None:
    for row in rows:
        if row["context"] == 2048:
            row["once_ms"] = [value * 10 for value in row["once_ms"]]


@pytest.mark.parametrize("fault", [slow_selection, nothing_saved, one_length_slow])
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None]) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    assert verdicts(rows)[0] in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)


def test_unequal_arms_are_errors() -> None:
    rows = honest()
    rows[3]["kv_ms"] = rows[3]["kv_ms"][:-1]
    with pytest.raises(ValueError, match="unequal"):
        claim.judge(rows, PROFILE)
    with pytest.raises(ValueError, match="unequal"):
        claim.judge(honest()[:-1], PROFILE)
