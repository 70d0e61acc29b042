"""The SATS claims on made-up rows: what they reproduce, their seeded faults, and their tables."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from artifact.profiles import Profile
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import sats_calibration, sats_finetuned, sats_vs_cats, token_routing
from paper_tables.figures import FOLDER, figures
from paper_tables.render import FOLDER as TABLES
from paper_tables.render import TableMissing, render, typed_figures
from tests.faults._sats import (
    PAPER,
    calibration_rows,
    changed,
    finetuned_rows,
    routing_rows,
    slower,
    versus_rows,
    worse,
)
from tests.faults.sats_vs_cats import half_precision_is_cut_off

EMBEDDED = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
GPU = Profile("gpu", "llama-3.1-8b", "cuda", "float16", None, 2)
Row = dict[str, Any]


def verdict(module: Any, rows: list[Row], profile: Profile) -> Verdict:
    """The verdict over what the profile asserts; accuracy needs data that the artifact does not hold."""
    return summarise([one for one in module.judge(rows, profile) if profile.name in one.predicate.asserted_in])


CLAIMS = {
    "sats_calibration": (sats_calibration, calibration_rows),
    "sats_vs_cats": (sats_vs_cats, versus_rows),
    "token_routing": (token_routing, routing_rows),
    "sats_finetuned": (sats_finetuned, finetuned_rows),
}


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("profile", [EMBEDDED, PAPER], ids=["embedded", "paper"])
def test_as_published(name: str, profile: Profile) -> None:
    module, honest = CLAIMS[name]
    assert verdict(module, honest(), profile) is Verdict.REPRODUCED


FAULTS = [
    ("sats_calibration", changed("recount", "layer_sparsity", lambda s: [v + 0.02 for v in s]), 0),
    ("sats_calibration", changed("recount", "layer_errors", lambda e: [v * 1.1 for v in e]), 1),
    ("sats_calibration", worse("sats10", 2.0), 2),
    ("sats_vs_cats", changed("window", "counted_sparsity", lambda s: s - 0.1, "cats50"), 0),
    ("sats_vs_cats", worse("sats50", 0.2), 1),
    ("sats_vs_cats", worse("sats30", 0.2), 2),
    ("sats_vs_cats", half_precision_is_cut_off, 4),
    ("sats_vs_cats", half_precision_is_cut_off, 5),
    ("token_routing", worse("sats50-routed75", 0.3), 0),
    ("token_routing", worse("sats50-routed50", 0.2), 1),
    ("token_routing", changed("window", "held_out_share", lambda s: s + 0.2, "routed50"), 2),
    ("token_routing", slower("sats50-routed50", 1.3), 3),
    ("token_routing", slower("sats50", 1.3), 4),
    ("sats_finetuned", worse("cats50-lora", 0.3), 0),
    ("sats_finetuned", worse("sats50-lora", 0.3), 1),
    ("sats_finetuned", slower("sats50-routed50-lora", 1.3), 2),
    ("sats_finetuned", slower("sats50-lora", 1.3), 3),
]


@pytest.mark.parametrize(("name", "fault", "number"), FAULTS)
def test_a_fault_turns_the_claim_away(name: str, fault: Callable[[list[Row]], None], number: int) -> None:
    module, honest = CLAIMS[name]
    rows = copy.deepcopy(honest())
    fault(rows)
    assert module.judge(rows, PAPER)[number].verdict is Verdict.CONTRADICTED


def test_orderings_of_8b_models_are_observed_on_the_embedded_one() -> None:
    rows = copy.deepcopy(versus_rows())
    worse("sats50", 0.2)(rows)
    findings = sats_vs_cats.judge(rows, EMBEDDED)
    assert findings[1].verdict is Verdict.OBSERVED and findings[1].interval is not None
    assert findings[1].interval.point > 0 and verdict(sats_vs_cats, rows, EMBEDDED) is Verdict.REPRODUCED


@pytest.mark.parametrize("module", [token_routing, sats_finetuned])
def test_on_synthetic_weights_speed_alone_is_judged(module: Any) -> None:
    name = module.NAME
    rows = [row for row in CLAIMS[name][1]() if row["kind"] == "timing"]
    slow = [row | {"model": "other"} for row in copy.deepcopy(rows)]
    findings = module.judge(rows, GPU)
    assert [finding.verdict for finding in findings[-2:]] == [Verdict.REPRODUCED] * 2
    for row in slow:
        if row["share"] < 1:
            row["ms"] = [value * 2 for value in row["ms"]]
    assert Verdict.CONTRADICTED in [one.verdict for one in module.judge(rows + slow, GPU)[-2:]]


def in_both_formats(rows: list[Row], slow: str = "") -> list[Row]:
    """Timed rows in float32 and bfloat16; every routed step of the format `slow` takes half as long again as dense."""
    found = [row | {"dtype": dtype} for dtype in ("bfloat16", "float32") for row in copy.deepcopy(rows)]
    for row in found:
        if row["dtype"] == slow and row["share"] < 1:
            row["ms"] = [value * 2 for value in row["ms"]]
    return found


@pytest.mark.parametrize("module", [token_routing, sats_finetuned])
@pytest.mark.parametrize("slow", ["bfloat16", "float32"])
def test_of_two_formats_the_one_that_gains_least_is_judged_and_both_are_printed(module: Any, slow: str) -> None:
    timed = [row for row in CLAIMS[module.NAME][1]() if row["kind"] == "timing"]
    faster = module.judge(in_both_formats(timed), GPU)[-2]
    assert faster.verdict is Verdict.REPRODUCED
    assert {"dense over routed, tiny, float32", "dense over routed, tiny, bfloat16"} <= set(faster.extra)
    faster = module.judge(in_both_formats(timed, slow), GPU)[-2]
    assert faster.verdict is Verdict.CONTRADICTED and faster.note == f"tiny, {slow}"


@pytest.mark.parametrize("module", [token_routing, sats_finetuned])
def test_a_format_without_room_is_said_and_the_other_is_judged(module: Any) -> None:
    timed = [row for row in CLAIMS[module.NAME][1]() if row["kind"] == "timing"]
    left = {"kind": "no-room", "model": "tiny", "dtype": "float32", "reason": "tiny in float32 needs 90 GB"}
    faster = module.judge([left, *(row | {"dtype": "bfloat16"} for row in timed)], GPU)[-2]
    assert faster.verdict is Verdict.REPRODUCED
    assert faster.extra["not timed, tiny, float32"] == left["reason"]
    faster = module.judge([left], GPU)[-2]
    assert faster.verdict is Verdict.NOT_RUN and faster.note == left["reason"]


def test_unequal_arms_are_errors() -> None:
    with pytest.raises(ValueError, match="windows"):
        sats_vs_cats.judge(versus_rows()[:-1], EMBEDDED)
    rows = routing_rows()
    rows[-1]["ms"] = rows[-1]["ms"][:-1]
    with pytest.raises(ValueError, match="unequal"):
        token_routing.judge(rows, EMBEDDED)


PAPERS = {"sats": json.loads((FOLDER / "sats.json").read_text(encoding="utf-8"))}
TABLES_OF = {
    "sats_table1": (versus_rows, 4),
    "sats_table2": (versus_rows, 4),
    "sats_table3": (finetuned_rows, 4),
    "sats_table4": (finetuned_rows, 5),
    "sats_table5": (versus_rows, 4),
    "sats_table6": (routing_rows, 5),
    "sats_table7": (finetuned_rows, 3),
    "sats_table8": (routing_rows, 6),
}


@pytest.mark.parametrize("name", TABLES_OF)
def test_tables_have_a_row_per_arm_and_no_typed_figure(name: str) -> None:
    honest, columns = TABLES_OF[name]
    assert typed_figures((TABLES / "templates" / f"{name}.tex.j2").read_text(encoding="utf-8")) == []
    text = render(name, honest(), {}, PAPERS)
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert all(line.count("&") == columns - 1 for line in body)
    assert sum(line.startswith("dense &") for line in body) == 1
    with pytest.raises(TableMissing):
        render(name, [], {}, PAPERS)


def test_windows_of_one_format_alone_are_not_compared() -> None:
    rows = [row for row in versus_rows() if row.get("dtype") != "bfloat16"]
    for finding in sats_vs_cats.judge(rows, PAPER)[4:6]:
        assert finding.verdict is Verdict.NOT_RUN and "bfloat16" in finding.note
    with pytest.raises(TableMissing, match="bfloat16"):
        render("sats_table5", rows, {}, PAPERS)
    rows = versus_rows()
    rows.remove(next(row for row in rows if row.get("dtype") == "bfloat16" and row["label"] == "sats50"))
    with pytest.raises(ValueError, match="windows"):
        sats_vs_cats.judge(rows, PAPER)


def test_table6_prints_rates_and_paired_speedups() -> None:
    text = render("sats_table6", routing_rows(), {}, PAPERS)
    line = next(line for line in text.splitlines() if line.startswith("sats50-routed50 "))
    assert r"\fromlive{1.11}" in line and r"\fromlive{110.4}" in line


def test_tables_keep_formats_apart() -> None:
    timed = [row for row in routing_rows() if row["kind"] == "timing"]
    rows = in_both_formats(timed, "bfloat16")
    line = next(line for line in render("sats_table8", rows, {}, PAPERS).splitlines() if "sats50-routed50 " in line)
    assert line.index(r"\fromlive{1.11}") < line.index(r"\fromlive{0.56}")
    sixth = render("sats_table6", rows, {}, PAPERS)
    assert "in float32 at" in sixth and r"\fromlive{0.56}" not in sixth
    seventh = in_both_formats([row for row in finetuned_rows() if row["kind"] == "timing"])
    text = render("sats_table7", seventh, {}, PAPERS)
    assert "{tiny, bfloat16}" in text and "{tiny, float32}" in text


def test_table8_says_what_was_not_measured() -> None:
    text = render("sats_table8", routing_rows(), {}, PAPERS)
    assert text.count("& not measured") == 2 * 4 and "hold float32 weights alone" in text
    left = {"kind": "no-room", "model": "tiny", "dtype": "bfloat16", "reason": "tiny in bfloat16 needs 90 GB"}
    assert "needs 90 GB" in render("sats_table8", [*routing_rows(), left], {}, PAPERS)


def test_every_printed_figure_has_its_place() -> None:
    for figure in figures("sats").values():
        assert figure.place and figure.what and figure.value > 0
