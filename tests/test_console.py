"""The card and the progress lines: the numbers of the record, readable, and truthful about the time left."""

from __future__ import annotations

import io
import math

import pytest

from artifact.claim import Finding, Predicate
from artifact.records import Cell, CellResult
from artifact.report import console
from artifact.report.console import (
    BarProgress,
    Meter,
    PlainProgress,
    card,
    interval_text,
    left_text,
    number,
    region_text,
)
from artifact.stats import Interval, Region, Verdict
from artifact.verify import Outcome


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6433.0, "6,433"),
        (74286.4, "74,286"),
        (1.5963, "1.596"),
        (0.0, "0"),
        (-0.25, "-0.25"),
        (0.00001234, "1.23e-05"),
        (100.0, "100"),
        (math.nan, "not measured"),
        (-math.inf, "-unbounded"),
    ],
)
def test_numbers_have_four_digits_and_lose_none_before_the_point(value: float, text: str) -> None:
    assert number(value) == text


def test_units_stand_where_they_belong() -> None:
    assert number(1.5, "x") == "1.5x" and number(1.5, "ms") == "1.5 ms"
    assert interval_text(Interval(1.5, 1.0, 2.0, 5, "t", "ms")) == "1.5 ms [1, 2]" and interval_text(None) == "-"
    assert interval_text(Interval(2.0, 2.0, 2.0, 1, "exact", "x")) == "2x"
    assert interval_text(Interval(math.nan, math.nan, math.nan, 3, "t", "x")) == "not measured"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(None, 2.0, "at most 2 ms"), (1.0, None, "at least 1 ms"), (1.0, 2.0, "1 to 2 ms"), (1.0, 1.0, "exactly 1 ms")],
)
def test_regions_read_as_inequalities(low: float | None, high: float | None, text: str) -> None:
    assert region_text(Region(low, high, "r", "ms")) == text
    assert region_text(Region(None, None, "r")) == "any value"


def outcome(verdict: Verdict, n: int = 1) -> Outcome:
    predicate = Predicate("p", "x [bold]is[/bold] one", "s", Region(0, 2, "r", "ms"), frozenset(), "1.0 ms")
    finding = Finding(predicate, Interval(1, 0.5, 1.5, 5, "t", "ms"), verdict, "a note", {"bandwidth_gbps": 12.345})
    return Outcome("demo", verdict, (finding,) * n, "a reason", seconds=90, peak_bytes=2_500_000_000, cells=7)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_the_card_shows_every_verdict_with_numbers_and_without_markup(verdict: Verdict) -> None:
    stream = io.StringIO()
    card([outcome(verdict)], stream)
    text = stream.getvalue()
    for part in (
        verdict.value,
        "1 ms [0.5, 1.5]",
        "0 to 2 ms",
        "1.0 ms",
        "a reason",
        "a note",
        "12.3",
        "1.5 min, 2.5 GB",
        "7 cells",
    ):
        assert part in text
    assert "x [bold]is[/bold] one" in text and "\x1b" not in text


def test_a_long_claim_shows_in_short_what_was_not_reproduced() -> None:
    many = Outcome(
        "demo", Verdict.CONTRADICTED, outcome(Verdict.REPRODUCED, 40).findings + outcome(Verdict.CONTRADICTED).findings
    )
    short, full = io.StringIO(), io.StringIO()
    card([many], short)
    card([many], full, full=True)
    assert "40 predicates reproduced" in short.getvalue() and short.getvalue().count("1 ms [0.5") == 1
    assert full.getvalue().count("1 ms [0.5") == 41


def test_the_time_left_follows_the_pace_of_what_really_ran() -> None:
    meter = Meter(total=10, done=4, now=100.0)
    assert meter.left_s(150.0) is None and left_text(None) == "time left unknown yet"
    meter.done = 6  # two cells took 50 s; the four that were kept from before took none of it
    assert meter.left_s(150.0) == pytest.approx(100.0)
    meter.fraction = 0.5
    assert meter.left_s(150.0) == pytest.approx(50 / 2.5 * 3.5) and meter.share == pytest.approx(0.65)
    assert left_text(30.0) == "about 30 s left" and left_text(180.0) == "about 3.0 min left"


def test_cells_that_are_asked_for_later_keep_the_pace() -> None:
    meter = Meter(total=4, done=0, now=0.0)
    meter.done = 2
    meter.grow(total=6, done=3)  # the third was kept from an earlier run
    assert meter.left_s(20.0) == pytest.approx(30.0)


def test_plain_progress_is_lines_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.cells("demo", 2, 1)
    progress.begin(Cell("demo", "4K", "m:f", {}, 3))
    for i in range(100):
        now[0] += 0.25
        progress.update(i / 100, f"step {i}")
    progress.end(Cell("demo", "4K", "m:f", {}, 3), CellResult("error", [], 20.0, 0, "out of memory"))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "demo: 2 cells, 1 kept from before"
    assert len(lines) == 4 and all("4K, block 3" in line for line in lines[1:])
    assert "left" in lines[1] and lines[-1].startswith("demo 2/2") and "failed: out of memory" in lines[-1]


def test_the_live_bar_survives_any_text_and_keeps_failures_in_view() -> None:
    from rich.console import Console

    stream = io.StringIO()
    bar = BarProgress(Console(file=stream, force_terminal=True, width=100))
    cell = Cell("demo", "[/x] 50%[bold]", "m:f", {})
    bar.cells("demo", 2, 0)
    bar.begin(cell)
    bar.update(0.5, "decode [step] 3")
    bar._bar.refresh()
    bar.end(cell, CellResult("error", [], 1.0, 0, "killed [by] 9"))
    bar.close()
    assert "killed [by] 9" in stream.getvalue() and "decode [step] 3" in stream.getvalue()
