"""Dispatch on made-up times: prices by hand, policies against brute force, the claim's seeded faults and its table."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest

from artifact.account import Mode, n_star
from artifact.deploy import dispatch
from artifact.deploy.dispatch import Block, Times
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import dispatch as claim
from paper_tables.figures import FOLDER
from paper_tables.render import FOLDER as TABLES
from paper_tables.render import TableMissing, render, typed_figures
from tests.faults.dispatch import (
    PROFILE,
    Row,
    composition_ran_one_branch,
    gate_of_another_machine,
    honest,
    selection_at_every_step,
    unequal_arms,
)

PAPER = {"crossover": json.loads((FOLDER / "crossover.json").read_text(encoding="utf-8"))}


def live() -> Times:
    return claim.gathered(honest())[1][0]


def test_a_request_is_priced_along_its_sequence() -> None:
    """By hand: 2,000 prompt tokens, 3 new ones, the first block; both reads 600 entries and pays 100 ms once."""
    totals = dispatch.priced(live(), [("chat", 2000, 3)])[0]
    assert totals["always dense"] == pytest.approx(3 * 22 + 0.0015 * (2000 + 2001 + 2002))
    assert totals["always compose"] == pytest.approx(3 * 14 + 0.0015 * (600 + 601 + 602) + 100)
    # The gate decides by the mean of the other blocks, and prices in this one: sparse projections, no selection.
    assert totals[dispatch.LATENCY_GATE] == pytest.approx(3 * 14 + 0.0015 * (2000 + 2001 + 2002))


def test_the_oracle_is_never_beaten_and_the_selection_is_charged_per_turn() -> None:
    mix, (first, _) = claim.gathered(honest())
    assert mix is not None
    decodes = dispatch.decodes_for(mix, first)
    for total in dispatch.priced(first, decodes):
        assert all(total[dispatch.ORACLE] <= other + 1e-9 for other in total.values())
    turns = [one for one in decodes if one[0] == "agent loop"]
    once = sum(first.blocks[0].costs().once(Mode.KV, prompt) for _, prompt, _ in turns)
    free = Block(first.blocks[0].contexts, first.blocks[0].step_ms, tuple((n, 0.0) for n, _ in first.blocks[0].once_ms),
                 0.3)  # fmt: skip
    priced = [dispatch.priced(Times("", first.shape, first.setting, (block, block)), turns)[0]["always selection"]
              for block in (first.blocks[0], free)]  # fmt: skip
    assert priced[0] - priced[1] == pytest.approx(once)


def test_the_byte_gate_changes_branch_at_the_byte_crossover() -> None:
    times = live()
    crossing = n_star(times.shape, times.setting)
    policy = dispatch.by_bytes(times)
    assert policy(int(crossing) - 1, 9) is Mode.PROJECTION
    assert policy(int(crossing) + 1, 9) is Mode.KV


def test_no_block_both_chooses_and_prices() -> None:
    times = live()
    with pytest.raises(ValueError, match="both calibrate"):
        dispatch.policies(Times("", times.shape, times.setting, times.blocks[:1]), 0)


def test_honest_rows_reproduce_and_the_card_names_every_policy() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert summarise(findings) is Verdict.REPRODUCED
    assert len(findings) == len(claim.CLAIM.predicates)
    assert {f"{name}, x" for name in dispatch.POLICIES} <= set(findings[0].extra)
    assert "example/model (recorded)" in findings[3].note
    shares = [value for key, value in findings[0].extra.items() if key.startswith("gate chooses")]
    assert sum(float(share) for share in shares) == pytest.approx(1)


@pytest.mark.parametrize("fault", [composition_ran_one_branch, selection_at_every_step, gate_of_another_machine])
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None]) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    assert summarise(claim.judge(rows, PROFILE)) in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)


def test_missing_rows_are_errors_or_not_run() -> None:
    rows = honest()
    unequal_arms(rows)
    with pytest.raises(ValueError, match="unequal"):
        claim.judge(rows, PROFILE)
    missing = [row for row in honest() if (row.get("block"), row.get("mode")) != (2, "kv")]
    with pytest.raises(ValueError, match="not all timed"):
        claim.judge(missing, PROFILE)
    assert all(f.verdict is Verdict.NOT_RUN for f in claim.judge([], PROFILE))
    only_live = [row for row in honest() if row.get("kind") != "times"]
    assert [f.verdict for f in claim.judge(only_live, PROFILE)][3:] == [Verdict.NOT_RUN] * 3


def test_the_recorded_h200_run_gives_the_papers_findings() -> None:
    rows = [*claim.recorded_times(), next(row for row in honest() if row.get("kind") == "mix")]
    assert {row["machine"] for row in rows if "machine" in row} >= {"h200/llama-3.1-8b"}
    best, most, gain = claim.judge(rows, PROFILE)[3:]
    assert (best.verdict, most.verdict) == (Verdict.REPRODUCED, Verdict.REPRODUCED)
    assert gain.interval is not None and 1.2 < gain.interval.point < 1.6


def test_table5_has_a_row_per_policy_and_labels_recorded_figures() -> None:
    rows = [{"origin": "live", **row} for row in honest()]
    text = render("table5", rows, {}, PAPER)
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert [line.split(" & ")[0] for line in body] == list(dispatch.POLICIES)
    assert all(line.count("&") == 4 and r"\fromlive" in line and r"\fromrecorded" in line for line in body)
    assert r"\frompaper{1.72x}" in text
    assert typed_figures((TABLES / "templates" / "table5.tex.j2").read_text(encoding="utf-8")) == []
    with pytest.raises(TableMissing):
        render("table5", [], {}, PAPER)
