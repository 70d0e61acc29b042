"""Tables 3 and 4 from made-up rows: every cell is derived, nothing is typed, missing rows leave no table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_composition_gain import honest as composition_rows
from test_retrieval_admissibility import honest as retrieval_rows

from paper_tables.figures import FOLDER
from paper_tables.render import FOLDER as TABLES
from paper_tables.render import TableMissing, render, typed_figures

PAPER = {"crossover": json.loads((FOLDER / "crossover.json").read_text(encoding="utf-8"))}


def stored(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    extra = {"origin": "live", "text": "a text", "context": 4096, "scored": 128}
    return [{**extra, **row} for row in rows]


@pytest.mark.parametrize("name", ["table3", "table4"])
def test_no_figure_is_typed_into_the_template(name: str) -> None:
    assert typed_figures((TABLES / "templates" / f"{name}.tex.j2").read_text(encoding="utf-8")) == []


def test_table3_counts_placements_and_distractors() -> None:
    rows = stored(retrieval_rows())
    text = render("table3", rows, {}, PAPER)
    line = next(line for line in text.splitlines() if line.startswith("window30 "))
    window = [r for r in rows if r["kind"] == "answer" and r["label"] == "window30" and not r["tuning"]]
    passkey = [r for r in window if r["test"] == "passkey" and r["turn"] == 1]
    right = sum(r["outcome"] == "right" for r in passkey)
    assert rf"\fromlive{{{right}/{len(passkey)}}}" in line
    assert rf"\fromlive{{{sum(r['outcome'] == 'distractor' for r in window)}}}" in line
    assert r"\frompaper{6.09}" in text and "dense &" in text


def test_table4_has_a_row_per_budget() -> None:
    text = render("table4", stored(composition_rows()), {}, PAPER)
    assert text.count(r"$^{*}$") == 4
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert len(body) == 6
    assert all(line.count("&") == 8 for line in body)


@pytest.mark.parametrize("name", ["table3", "table4"])
def test_without_rows_there_is_no_table(name: str) -> None:
    with pytest.raises(TableMissing):
        render(name, [], {}, PAPER)
