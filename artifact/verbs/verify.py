"""`artifact verify NAME...` and `artifact verify-all`: measure, judge, print the card, write the tables.

The last line of standard output is one compact JSON object with the same verdicts as the card above it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from artifact import claim as claims
from artifact import profiles, system
from artifact.errors import UserError
from artifact.records import Run, new_run_path, runs_folder
from artifact.verify import EXIT_ERROR, Outcome, exit_code, isolated, merge_results, verify

OPTIONS = (
    click.option("--quick", is_flag=True, help="Fewer samples, the same regions: about two minutes a claim."),
    click.option(
        "--profile", type=click.Choice(profiles.NAMES), help="embedded (CPU), gpu or paper; default by machine."
    ),
    click.option(
        "--model", metavar="PATH", help="A Hugging Face directory or GGUF file instead of the profile's model."
    ),
    click.option("--text", metavar="FILE", help="A text file instead of the profile's text."),
    click.option("--run", "run_path", metavar="DIR", help="Resume this run, or make the new one here."),
    click.option("--minutes", type=click.FloatRange(min=0.1), help="Time budget of a claim: 10 adds long prompts."),
    click.option("--json", "as_json", is_flag=True, help="Only the JSON line on standard output."),
)


@dataclass(frozen=True)
class Options:
    """What the options of both verbs come to."""

    quick: bool
    profile: str | None
    model: str | None
    text: str | None
    run_path: str | None
    minutes: float | None
    as_json: bool


@click.command("verify")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def command(names: tuple[str, ...], **options: object) -> int:
    """Measure and judge the named claims (`artifact list` shows them)."""
    return execute(list(dict.fromkeys(names)), Options(**options))  # type: ignore[arg-type]


@click.command("verify-all")
@click.option("--paper", metavar="PAPER", help="Only the claims of this paper, such as crossover.")
def all_command(paper: str | None, **options: object) -> int:
    """Measure and judge every claim and write the tables of the run."""
    names = claims.names() if paper is None else names_of(paper)
    return execute(names, Options(**options), largest_first=True)  # type: ignore[arg-type]


for _verb in (command, all_command):
    for _option in reversed(OPTIONS):
        _option(_verb)


def names_of(paper: str) -> list[str]:
    """Claims of one paper, and any that cannot be loaded: nobody knows whose it is. UserError for an unknown paper."""
    papers: dict[str, str | None] = {}
    for name in claims.names():
        module, _ = isolated(functools.partial(claims.load, name), None, name)
        papers[name] = None if module is None else module.claim.paper
    if paper not in papers.values():
        known = ", ".join(sorted({one for one in papers.values() if one is not None}))
        raise UserError(f"no claim is of paper {paper!r}; there are {known}")
    return [name for name, one in papers.items() if one in (paper, None)]


def by_memory(names: Sequence[str], profile: str) -> list[str]:
    """Claims in falling order of the memory that they were last seen to take, others behind them.

    What a claim gives back the next one takes at once; memory that a virtual machine has not touched for seconds, or
    never, took up to 4 s a gigabyte.
    """
    from artifact.verbs.list import shipped

    costs = shipped()
    return sorted(names, key=lambda name: -int(costs.get(name, {}).get(profile, {}).get("peak_bytes", 0)))


def execute(names: Sequence[str], options: Options, largest_first: bool = False) -> int:
    """Verify the claims in one run folder, in their order or that of their memory, and return the exit code."""
    for name in names:
        if name not in claims.names():
            claims.load(name)  # raises the sentence about unknown names before anything is measured
    profile = profiles.choose(options.profile, options.model, options.text)
    names = by_memory(names, profile.name) if largest_first else names
    path = (
        Path(options.run_path)
        if options.run_path
        else new_run_path(runs_folder(), profile.name + ("-quick" if options.quick else ""))
    )
    if path.exists() and not path.is_dir():
        raise UserError(f"--run {path} is a file; give a folder")
    from artifact.report import console
    from artifact.report.write import write_reports, write_tables

    budget_s = None if options.minutes is None else 60 * options.minutes
    with _open(path, profile, options.quick, budget_s) as run:
        run.write_json("system.json", system.describe())
        click.echo(profile_line(profile, options.profile is None), err=True)
        run.progress = console.progress()
        try:
            outcomes = verify(run, names)
        finally:
            run.progress.close()
        code = exit_code(outcomes)
        merge_results(run.path, run.profile, run.quick, [])
        tables, skipped, sound = write_tables(path)
        code = code if sound else EXIT_ERROR
        reports, missing = write_reports(path, skipped)
    if not options.as_json:
        console.card(outcomes)
        _footer(path, tables, skipped)
        _report_lines(path, reports, missing)
    click.echo(json.dumps(summary(path, outcomes, code), separators=(",", ":"), sort_keys=True))
    return code


def profile_line(profile: profiles.Profile, chosen: bool) -> str:
    """What is about to run, and why where nobody asked for it."""
    model = Path(profile.model).name
    why = ""
    if chosen:
        why = " (a CUDA GPU was found)" if profile.device == "cuda" else " (no usable CUDA GPU here)"
    device = f"{profile.threads} CPU threads" if profile.device == "cpu" else "CUDA"
    return f"profile {profile.name}{why}: {model}, {profile.dtype}, {device}"


def _open(path: Path, profile: profiles.Profile, quick: bool, budget_s: float | None) -> Run:
    try:
        return Run(path, profile, quick, budget_s)
    except OSError as error:
        raise UserError(f"run folder {path} cannot be written ({error.strerror}); choose another with --run") from None


def _footer(path: Path, tables: Sequence[Path], skipped: dict[str, str]) -> None:
    click.echo()
    for table in tables:
        click.echo(f"table  {_relative(table)}")
    _left_out("table ", "tables", skipped)


def _left_out(head: str, plural: str, missing: dict[str, str]) -> None:
    """What was not made. That a run of few claims lacks the others' rows is one line, any other reason its own."""
    other = [name for name, reason in missing.items() if reason.startswith("no samples of ")]
    for name, reason in missing.items():
        if name not in other:
            click.echo(f"{head} {name} not made: {reason}")
    if other:
        click.echo(f"{head} {len(other)} {plural} of claims that this run does not hold")


def _report_lines(path: Path, reports: Sequence[Path], missing: dict[str, str]) -> None:
    """Figures by name, the page, and what was not made; the other records lie beside the page."""
    for report in reports:
        if report.suffix in (".pdf", ".html"):
            click.echo(f"{'figure' if report.suffix == '.pdf' else 'page  '} {_relative(report)}")
    _left_out("      ", "figures", missing)
    click.echo(f"run    {_relative(path)}")


def summary(path: Path, outcomes: Sequence[Outcome], code: int) -> dict[str, object]:
    """The machine-readable last line: verdict per claim, exit code, run folder relative to the working directory."""
    verdicts = {outcome.name: outcome.verdict.value for outcome in outcomes}
    reasons = {outcome.name: outcome.reason for outcome in outcomes if outcome.reason}
    return {"claims": verdicts, "exit_code": code, "run": _relative(path)} | ({"reasons": reasons} if reasons else {})


def _relative(path: Path) -> str:
    return os.path.relpath(path)
