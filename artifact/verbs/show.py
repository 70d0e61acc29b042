"""`artifact show NAME`: what a claim says and when it holds. `artifact show RUN`: the verdicts of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from artifact import claim as claims
from artifact.errors import UserError
from artifact.records import read_options
from artifact.samples import SampleLog
from artifact.verbs.tables import run_folder
from artifact.verify import judge_claim, outcome_json


@click.command("show")
@click.argument("what", metavar="NAME|RUN")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(what: str, as_json: bool) -> int:
    """Explain the claim NAME, or show the verdicts of the folder RUN judged from its samples."""
    if what in claims.names():
        return show_claim(claims.load(what).claim, as_json)
    try:
        folder = run_folder(what)
    except UserError:
        known = ", ".join(claims.names())
        raise UserError(
            f"{what} is neither a claim ({known}) nor a run folder; `artifact list` shows the claims"
        ) from None
    return show_run(folder, as_json)


def show_claim(claim: claims.Claim, as_json: bool) -> int:
    """Everything that is fixed about a claim before it is measured."""
    from artifact.report.console import region_text

    described: dict[str, Any] = {
        "name": claim.name,
        "title": claim.title,
        "paper": claim.paper,
        "place": claim.place,
        "needs": claim.needs,
        "minutes": dict(claim.minutes),
        "tables": list(claim.tables),
        "predicates": [
            {
                "name": p.name,
                "statement": p.statement,
                "place": p.place,
                "paper_value": p.paper_value,
                "accepted": region_text(p.region),
                "reason": p.region.reason,
                "asserted_in": sorted(p.asserted_in),
            }
            for p in claim.predicates
        ],
    }
    if as_json:
        click.echo(json.dumps(described, separators=(",", ":"), sort_keys=True))
        return 0
    click.echo(f"{claim.name}: {claim.title}\n{claim.paper}, {claim.place}; needs {claim.needs}")
    click.echo("minutes " + ", ".join(f"{profile} {minutes}" for profile, minutes in claim.minutes.items()))
    for entry in described["predicates"]:
        paper = f"; the paper: {entry['paper_value']}" if entry["paper_value"] else ""
        click.echo(f"\n  {entry['name']} ({entry['place']}{paper})\n    {entry['statement']}")
        click.echo(f"    accepted: {entry['accepted']}, because {entry['reason']}")
        click.echo(f"    asserted in: {', '.join(entry['asserted_in']) or 'no profile, observed only'}")
    click.echo(f"\nartifact verify {claim.name}    or    python claims/{claim.name}.py")
    return 0


def show_run(folder: Path, as_json: bool) -> int:
    """The card of a stored run, judged again from its samples; nothing is written."""
    from artifact.report.console import card

    profile, quick = read_options(folder)
    log = SampleLog(folder / "samples.jsonl")
    outcomes = [judge_claim(log, name, profile) for name in log.claims() if name in claims.names()]
    if as_json:
        shown = {"profile": profile.name, "quick": quick, "claims": {o.name: outcome_json(o) for o in outcomes}}
        click.echo(json.dumps(shown, separators=(",", ":"), sort_keys=True))
        return 0
    card(outcomes, full=True)
    if log.dropped_lines:
        click.echo(f"\n{log.dropped_lines} lines of samples.jsonl belong to no complete cell and were not used")
    return 0
