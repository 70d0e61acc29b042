"""`artifact compare A B`: verdicts and values of two runs side by side, and what differs between their machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from artifact import claim as claims
from artifact.errors import UserError
from artifact.records import read_json, read_options
from artifact.samples import SampleLog
from artifact.verbs.tables import run_folder
from artifact.verify import judge_claim, outcome_json

MISSING = "-"


@click.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--full", is_flag=True, help="Also the predicates that were only computed and agree exactly.")
def command(a: str, b: str, as_json: bool, full: bool) -> int:
    """Compare the runs A and B: folders, or names of recorded machines. Judged again from samples; writes nothing."""
    with _opened(a) as first, _opened(b) as second:
        compared = compare(first, second)
    if as_json:
        click.echo(json.dumps(compared, separators=(",", ":"), sort_keys=True))
        return 0
    _show(a, b, compared, full)
    return 0


@contextmanager
def _opened(name: str) -> Iterator[Path]:
    from paper_tables.recorded import machines, opened

    if name in machines():
        with opened(name) as folder:
            yield folder
        return
    try:
        folder = run_folder(name)
    except UserError:
        known = ", ".join(machines()) or "none"
        raise UserError(f"{name} is neither a run folder nor a recorded machine ({known})") from None
    yield folder


def compare(a: Path, b: Path) -> dict[str, Any]:
    """`settings` and `system` as {name: [in A, in B]} where they differ, `claims` as rows of both verdicts."""
    from artifact.report.stored import flat

    judged = [_judged(folder) for folder in (a, b)]
    systems = [flat(read_json(folder / "system.json")) for folder in (a, b)]
    settings = [flat(_settings(folder)) for folder in (a, b)]
    names = sorted({name for one in judged for name in one})
    rows = {name: _rows(judged[0].get(name), judged[1].get(name)) for name in names}
    return {"settings": _differing(*settings), "system": _differing(*systems), "claims": rows}


def _settings(folder: Path) -> dict[str, Any]:
    from artifact.profiles import to_record

    profile, quick = read_options(folder)
    return {**to_record(profile), "quick": quick}


def _judged(folder: Path) -> dict[str, dict[str, Any]]:
    profile, _ = read_options(folder)
    log = SampleLog(folder / "samples.jsonl")
    known = claims.names()
    return {name: outcome_json(judge_claim(log, name, profile)) for name in log.claims() if name in known}


def _differing(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, list[str]]:
    pairs = {name: [a.get(name, MISSING), b.get(name, MISSING)] for name in sorted(a.keys() | b.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _rows(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The claim's own verdicts, then one row per predicate of either run."""
    sides = [{f["predicate"]: f for f in one["findings"]} if one else {} for one in (a, b)]
    whole = [one["verdict"] if one else "absent" for one in (a, b)]
    rows: list[dict[str, Any]] = [{"predicate": "", "verdicts": whole}]
    for predicate in dict.fromkeys([*sides[0], *sides[1]]):
        found = [side.get(predicate) for side in sides]
        rows.append(
            {
                "predicate": predicate,
                "verdicts": [one["verdict"] if one else "absent" for one in found],
                "intervals": [one["interval"] if one else None for one in found],
                "ratio": _ratio([one["interval"]["point"] if one and one["interval"] else None for one in found]),
            }
        )
    return rows


def _ratio(points: list[float | None]) -> float | None:
    """B over A, where both are there and it means something."""
    a, b = points
    return b / a if a is not None and b is not None and a != 0 else None


def _show(a: str, b: str, compared: Mapping[str, Any], full: bool) -> None:
    from artifact.report.console import number
    from artifact.report.numbers import measured_text

    for title in ("settings", "system"):
        click.echo(f"{title}: " + ("the same" if not compared[title] else f"A = {a}, B = {b}"))
        for name, (one, other) in compared[title].items():
            click.echo(f"  {name}: {one}  |  {other}")
    for name, (whole, *rows) in compared["claims"].items():
        click.echo(f"\n{name}: {whole['verdicts'][0]}  |  {whole['verdicts'][1]}")
        hidden = 0
        for row in rows:
            if not full and row["verdicts"][0] == row["verdicts"][1] and row["ratio"] == 1:
                hidden += 1
                continue
            sides = [
                f"{measured_text({'interval': interval})} {verdict}"
                for interval, verdict in zip(row["intervals"], row["verdicts"], strict=True)
            ]
            ratio = "" if row["ratio"] is None else f"  (B/A {number(row['ratio'])})"
            click.echo(f"  {row['predicate']}: {sides[0]}  |  {sides[1]}{ratio}")
        if hidden:
            click.echo(f"  {hidden} predicates agree exactly; --full lists them")
