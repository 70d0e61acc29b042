"""report.html: one page that opens offline, prints, and reads aloud. Everything on it comes from the run folder.

The template escapes every expression; the only markup that is passed in is drawn by `artifact.report.intervals`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifact import claim as claims
from artifact.report import intervals, raw
from artifact.report.numbers import accepted_text, interval_of, measured_text, region_of, value_text
from artifact.report.stored import Stored, flat
from artifact.stats import Verdict
from artifact.verify import isolated

if TYPE_CHECKING:
    from jinja2 import Environment

    from paper_tables.plots.render import Plot

FOLDER = Path(__file__).resolve().parent
SHOWN = 12  # predicates of one claim before those that were reproduced are folded away
MARKS = {
    Verdict.REPRODUCED: "✓",
    Verdict.CONTRADICTED: "✗",
    Verdict.INCONCLUSIVE: "?",
    Verdict.NOT_RUN: "–",
    Verdict.ERROR: "!",
    Verdict.OBSERVED: "○",
}
MEANINGS = {
    Verdict.REPRODUCED: "the measured interval lies inside the acceptance region",
    Verdict.CONTRADICTED: "the interval and the region do not meet",
    Verdict.INCONCLUSIVE: "the interval straddles the region's edge, or too little was measured",
    Verdict.NOT_RUN: "not measured here, with the reason",
    Verdict.ERROR: "a check failed: the figures are not used",
    Verdict.OBSERVED: "measured, but nothing is asserted in this profile",
}
# Results of the recorded machines by machine name, as `recorded_results` returns them.
Recorded = Mapping[str, Mapping[str, Any]]


def render(stored: Stored, plots: Sequence[Plot] = (), missing: Mapping[str, str] | None = None) -> str:
    """The page. `missing` names tables and figures that were not made, with the reason."""
    from paper_tables.recorded import recorded_results

    recorded = recorded_results()
    cards = [_card(stored, name, claim, recorded) for name, claim in stored.claims.items()]
    verdicts = [card["verdict"] for card in cards]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            stored=stored,
            cards=cards,
            counts=[(verdict, verdicts.count(verdict.value)) for verdict in Verdict if verdict.value in verdicts],
            marks={verdict.value: mark for verdict, mark in MARKS.items()},
            meanings=[(verdict.value, meaning) for verdict, meaning in MEANINGS.items()],
            figures=[_figure(plot) for plot in plots],
            missing=sorted((missing or {}).items()),
            caveats=_caveats(stored),
            recorded=sorted(recorded),
            system=flat({key: value for key, value in stored.system.items() if key != "schema"}),
        )
    )


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _card(stored: Stored, name: str, claim: Mapping[str, Any], recorded: Recorded) -> dict[str, Any]:
    """One claim as the template prints it."""
    module, _ = isolated(lambda: claims.load(name), None, name)
    rows = stored.rows(name)
    findings = [_finding(finding, name, rows, recorded) for finding in claim["findings"]]
    folded = len(findings) > SHOWN
    return {
        "name": name,
        "title": module.claim.title if module else name,
        "place": f"{module.claim.paper}, {module.claim.place}" if module else "",
        "verdict": claim["verdict"],
        "reason": claim["reason"],
        "cost": f"{claim['minutes']:.1f} min, {claim['peak_bytes'] / 1e9:.1f} GB peak memory, {claim['cells']} cells",
        "findings": [one for one in findings if not folded or one["verdict"] != Verdict.REPRODUCED],
        "folded": [one for one in findings if folded and one["verdict"] == Verdict.REPRODUCED],
        "raw": raw.tables(rows),
        "lines": raw.span([line for line, _ in rows]),
        "command": f"artifact verify {name}",
    }


def _finding(
    finding: Mapping[str, Any], name: str, rows: Sequence[tuple[int, Mapping[str, Any]]], recorded: Recorded
) -> dict[str, Any]:
    interval, region = interval_of(finding), region_of(finding)
    lines = raw.lines_of(finding["predicate"], rows)  # type: ignore[arg-type]
    return {
        "predicate": finding["predicate"],
        "statement": finding["statement"],
        "place": finding["place"],
        "paper": finding["paper_value"] or "–",
        "recorded": _recorded(name, finding["predicate"], recorded),
        "live": measured_text(finding),
        "accepted": accepted_text(finding),
        "why": region.reason,
        "drawing": intervals.draw(interval, region, finding["verdict"]),
        "verdict": finding["verdict"],
        "note": finding["note"],
        "method": f"{interval.method}, n = {interval.n}" if interval else "",
        "extra": [(key, value_text(value)) for key, value in finding["extra"].items()],
        "anchor": f"L{lines[0]}" if len(lines) == 1 else f"raw-{name}",
        "lines": raw.span(lines),
    }


def _recorded(name: str, predicate: str, recorded: Recorded) -> list[tuple[str, str, str]]:
    """Machine, value and verdict of the same predicate in every recorded run."""
    found = []
    for machine in sorted(recorded):
        findings = recorded[machine].get("claims", {}).get(name, {}).get("findings", [])
        found += [(machine, measured_text(f), f["verdict"]) for f in findings if f["predicate"] == predicate]
    return found


def _figure(plot: Plot) -> dict[str, str]:
    png = next(path for path in plot.files if path.suffix == ".png")
    content = png.read_bytes()
    data = base64.b64encode(content).decode("ascii")
    # The header of a PNG holds its width in pixels; all figures are shown at one scale.
    width = round(0.72 * int.from_bytes(content[16:20], "big"))
    return {
        "name": plot.name,
        "title": plot.title,
        "alt": plot.alt,
        "data": f"data:image/png;base64,{data}",
        "width": str(width),
    }


def _caveats(stored: Stored) -> list[str]:
    """What a reader must know before comparing anything."""
    found = ["Absolute times and speedups belong to the machine that ran; they are judged only against this machine."]
    if stored.quick:
        found.append("This was a quick run: fewer blocks and steps, the same acceptance regions.")
    if stored.log.dropped_lines:
        found.append(f"{stored.log.dropped_lines} lines of samples.jsonl belong to no complete cell and were not used.")
    if not stored.system.get("commit"):
        found.append("The source was no clean checkout, so no commit names what was run.")
    for name, claim in stored.claims.items():
        if claim["reason"]:
            found.append(f"{name}: {claim['reason']}")
        found += [f"{name}, {f['predicate']}: {f['note']}" for f in claim["findings"] if f["note"]]
    return list(dict.fromkeys(found))
