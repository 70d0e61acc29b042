"""What a person sees: progress while cells run, and the card of verdicts at the end. Progress goes to standard error.

On a terminal progress is one live bar; elsewhere it is plain lines, at most one every few seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from artifact.claim import Finding
from artifact.stats import Interval, Region, Verdict
from artifact.verify import Outcome

if TYPE_CHECKING:
    from artifact.records import Cell, CellResult

STYLES = {
    Verdict.REPRODUCED: "green",
    Verdict.CONTRADICTED: "bold red",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.NOT_RUN: "yellow",
    Verdict.ERROR: "bold red",
    Verdict.OBSERVED: "cyan",
}
CARD_ROWS = 12  # of one claim, before the card is longer than a screen
PLAIN_EVERY_S = 10.0
PLAIN_WIDTH = 132


def number(value: float, unit: str = "") -> str:
    """Four significant digits, thousands separated, with its unit; a plain word for what is not finite."""
    if math.isnan(value):
        return "not measured"
    if math.isinf(value):
        return "unbounded" if value > 0 else "-unbounded"
    digits = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
    if value and abs(value) < 1e-4:
        text = f"{value:.3g}"
    else:
        text = f"{value:,.{digits}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return text + (unit if unit in ("x", "%", "") else f" {unit}")


def interval_text(interval: Interval | None) -> str:
    """Point and interval, or only the point of an exact value or of one that was not measured."""
    if interval is None:
        return "-"
    if interval.low == interval.high or math.isnan(interval.point):
        return number(interval.point, interval.unit)
    return f"{number(interval.point, interval.unit)} [{number(interval.low)}, {number(interval.high)}]"


def region_text(region: Region) -> str:
    """The acceptance region as an inequality."""
    if region.low is None and region.high is None:
        return "any value"
    if region.low is None:
        return f"at most {number(region.high or 0.0, region.unit)}"
    if region.high is None:
        return f"at least {number(region.low, region.unit)}"
    if region.low == region.high:
        return f"exactly {number(region.low, region.unit)}"
    return f"{number(region.low)} to {number(region.high, region.unit)}"


def card(outcomes: Sequence[Outcome], stream: TextIO | None = None, full: bool = False) -> None:
    """The verdict of every claim with its predicates, intervals and acceptance regions.

    Of a claim with many predicates the reproduced ones are only counted, unless `full`.
    """
    console = _console(stream or sys.stdout)
    for outcome in outcomes:
        console.print()
        cost = f"{outcome.seconds / 60:.1f} min, {outcome.peak_bytes / 1e9:.1f} GB peak, {outcome.cells} cells"
        console.print(Text.assemble((outcome.name, "bold"), "  ", _verdict(outcome.verdict), f"  {cost}"))
        if outcome.reason:
            console.print(Text(f"  {outcome.reason}"), soft_wrap=True)
        shown = outcome.findings if full else _worth_showing(outcome.findings)
        if shown:
            console.print(_findings(shown))
        if hidden := len(outcome.findings) - len(shown):
            console.print(f"  {hidden} predicates reproduced; `artifact show RUN` lists them")
        for details, names in _details(shown).items():
            console.print(Text(f"  {', '.join(names)}: {details}", style="dim"), soft_wrap=True)


def _details(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """What stands under the table: notes and further numbers, once, with the names of the predicates they belong to."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        extra = [f"{key} {v if isinstance(v, str) else number(v)}" for key, v in finding.extra.items()]
        if details := "; ".join(filter(None, [finding.note, *extra])):
            found.setdefault(details, []).append(finding.predicate.name)
    return found


def _worth_showing(findings: Sequence[Finding]) -> Sequence[Finding]:
    if len(findings) <= CARD_ROWS:
        return findings
    return [finding for finding in findings if finding.verdict is not Verdict.REPRODUCED]


def _findings(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), show_edge=False)
    for heading in ("", "predicate", "measured", "accepted", "paper", "verdict"):
        table.add_column(heading, overflow="fold", ratio=3 if heading == "predicate" else None)
    for finding in findings:
        predicate = finding.predicate
        table.add_row(
            "",
            Text(predicate.statement),
            Text(interval_text(finding.interval)),
            Text(region_text(predicate.region)),
            Text(predicate.paper_value or "-"),
            _verdict(finding.verdict),
        )
    return table


def _verdict(verdict: Verdict) -> Text:
    return Text(verdict.value, style=STYLES[verdict])


def _console(stream: TextIO) -> Console:
    return Console(file=stream) if stream.isatty() else Console(file=stream, width=PLAIN_WIDTH, no_color=True)


class Meter:
    """How much of the cells that must run has run, and the time that the rest will take at the same pace."""

    def __init__(self, total: int, done: int, now: float) -> None:
        self.total, self.done, self.fraction = total, done, 0.0
        self._first, self._start = done, now

    def grow(self, total: int, done: int) -> None:
        """More cells are asked for; those that are done beyond the count were kept from before and took no time."""
        self._first += done - self.done
        self.total, self.done, self.fraction = total, done, 0.0

    @property
    def share(self) -> float:
        """Share of all cells that is finished, the running one in part."""
        return (self.done + self.fraction) / self.total if self.total else 1.0

    def left_s(self, now: float) -> float | None:
        """Seconds left, or None while nothing has been run that could tell."""
        ran = self.done - self._first + self.fraction
        return (now - self._start) / ran * (self.total - self.done - self.fraction) if ran > 0.02 else None


def left_text(seconds: float | None) -> str:
    """Time left in words."""
    if seconds is None:
        return "time left unknown yet"
    return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.1f} min left"


class PlainProgress:
    """Progress as lines of text, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._meter = Meter(0, 0, 0.0)
        self._claim, self._cell, self._shown = "", "", -math.inf

    def cells(self, claim: str, total: int, done: int) -> None:
        if claim == self._claim:
            self._meter.grow(total, done)
            return
        self._claim, self._meter = claim, Meter(total, done, time.monotonic())
        kept = f", {done} kept from before" if done else ""
        self._say(f"{claim}: {total} cells{kept}")

    def begin(self, cell: Cell) -> None:
        self._cell = f"{cell.key}, block {cell.block}"
        self._meter.fraction = 0.0

    def update(self, fraction: float, doing: str) -> None:
        self._meter.fraction = min(1.0, max(0.0, fraction))
        if time.monotonic() - self._shown >= PLAIN_EVERY_S:
            self._line(f"{self._cell}: {doing}" if doing else self._cell)

    def end(self, cell: Cell, result: CellResult) -> None:
        self._meter.done, self._meter.fraction = self._meter.done + 1, 0.0
        self._line(f"{self._cell}: {_ended(result)}")

    def close(self) -> None:
        self._stream.flush()

    def _line(self, what: str) -> None:
        meter = self._meter
        self._say(f"{self._claim} {meter.done}/{meter.total}  {what}  ({left_text(meter.left_s(time.monotonic()))})")

    def _say(self, line: str) -> None:
        self._shown = time.monotonic()
        print(line, file=self._stream, flush=True)


class BarProgress:
    """Progress as one live line on a terminal; finished cells that failed stay above it."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = console or Console(stderr=True)
        columns = (
            TextColumn("{task.fields[claim]}"),
            BarColumn(24),
            TextColumn("{task.fields[done]}  {task.description}"),
        )
        self._bar = Progress(*columns, TextColumn("[dim]{task.fields[left]}"), console=self._console, transient=True)
        self._task = self._bar.add_task("", claim="", done="", left="")
        self._meter = Meter(0, 0, 0.0)
        self._claim, self._cell = "", ""

    def cells(self, claim: str, total: int, done: int) -> None:
        if claim == self._claim:
            self._meter.grow(total, done)
            return
        self._claim, self._meter = claim, Meter(total, done, time.monotonic())
        self._bar.update(self._task, claim=claim, total=1.0)
        self._bar.start()

    def begin(self, cell: Cell) -> None:
        self._cell = f"{cell.key}, block {cell.block}"
        self._show(self._cell)

    def update(self, fraction: float, doing: str) -> None:
        self._meter.fraction = min(1.0, max(0.0, fraction))
        self._show(f"{self._cell}: {doing}" if doing else self._cell)

    def end(self, cell: Cell, result: CellResult) -> None:
        self._meter.done, self._meter.fraction = self._meter.done + 1, 0.0
        if result.status == "error":
            self._console.print(Text(f"{self._cell}: {_ended(result)}", style="red"))
        self._show(self._cell)

    def close(self) -> None:
        self._bar.stop()

    def _show(self, what: str) -> None:
        meter = self._meter
        self._bar.update(
            self._task,
            completed=meter.share,
            description=escape(what),
            done=f"{meter.done}/{meter.total}",
            left=left_text(meter.left_s(time.monotonic())),
        )


def _ended(result: CellResult) -> str:
    if result.status == "error":
        return f"failed: {result.error}"
    return f"{result.seconds:.1f} s, {result.peak_bytes / 1e9:.2f} GB"


def progress() -> PlainProgress | BarProgress:
    """The live bar on a terminal, lines elsewhere."""
    return BarProgress() if sys.stderr.isatty() else PlainProgress()
