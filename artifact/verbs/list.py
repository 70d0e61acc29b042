"""`artifact list`: every claim with what it needs and the minutes and memory that it last took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from artifact import claim as claims
from artifact.errors import UserError
from artifact.records import SCHEMA, read_json, runs_folder, write_json
from artifact.stats import Verdict
from artifact.verbs.tables import run_folder
from artifact.verify import isolated, read_results

SHIPPED = "measured.json"


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
@click.option("--ship", metavar="RUN", help="Write the costs of this full run into claims/measured.json.")
def command(as_json: bool, ship: str | None) -> int:
    """List the claims: what each needs, its last measured minutes and peak memory."""
    if ship is not None:
        ship_costs(run_folder(ship))
    last = last_measured(runs_folder())
    entries = [_entry(name, last) for name in claims.names()]
    if as_json:
        click.echo(json.dumps(entries, separators=(",", ":"), sort_keys=True))
        return 0
    for entry in entries:
        click.echo(f"{entry['name']}  ({entry['paper']}, {entry['place']})")
        click.echo(f"    {entry['title']}")
        click.echo(f"    needs {entry['needs']}")
        for profile, minutes in entry.get("expected_minutes", {}).items():
            told = minutes if minutes.startswith("not run") else f"{minutes} min expected, not measured here"
            click.echo(f"    {profile}: {told}")
        for cost in entry["measured"]:
            memory = f", {cost['peak_bytes'] / 1e9:.1f} GB" if cost["peak_bytes"] else ""
            click.echo(
                f"    {cost['profile']}: {cost['minutes']:.1f} min{memory} ({cost['source']}), {cost['verdict']}"
            )
    click.echo("\nartifact verify NAME... measures and judges; artifact show NAME explains one claim.")
    return 0


def _entry(name: str, last: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    module, fault = isolated(lambda: claims.load(name), None, name)
    if module is None:
        reason = fault.reason if fault else "unknown"
        return {
            "name": name,
            "title": f"cannot be loaded: {reason}",
            "paper": "-",
            "place": "-",
            "needs": "-",
            "measured": [],
        }
    claim = module.claim
    measured = last.get(name, [])
    have = {entry["profile"] for entry in measured}
    entry = {"name": name, "title": claim.title, "paper": claim.paper, "place": claim.place, "needs": claim.needs}
    expected = {profile: minutes for profile, minutes in claim.minutes.items() if profile not in have}
    return entry | {"measured": measured, "expected_minutes": expected}


def last_measured(runs: Path) -> dict[str, list[dict[str, Any]]]:
    """Per claim, the newest full run of each profile: local runs first, then the figures that ship with the claims."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for folder in sorted(runs.glob("*/"), reverse=True):
        try:
            results = read_results(folder)
        except UserError:
            continue  # a run that was interrupted before its first verdict, or a stranger's folder
        if results.get("quick"):
            continue
        for name, claim in results["claims"].items():
            found.setdefault((name, str(results.get("profile"))), _cost(claim, f"run {folder.name}"))
    for name, per_profile in shipped().items():
        for profile, claim in per_profile.items():
            found.setdefault((name, profile), _cost(claim, claim.get("machine", "shipped")))
    listed: dict[str, list[dict[str, Any]]] = {}
    for (name, profile), cost in sorted(found.items()):
        listed.setdefault(name, []).append(cost | {"profile": profile})
    return listed


def _cost(claim: dict[str, Any], source: str) -> dict[str, Any]:
    return {
        "minutes": float(claim.get("minutes", 0.0)),
        "peak_bytes": int(claim.get("peak_bytes", 0)),
        "verdict": str(claim.get("verdict", "unknown")),
        "source": source,
    }


def ship_costs(folder: Path) -> None:
    """Merge the costs of a full run into claims/measured.json, with the machine in words; a claim that was not run has
    none. UserError for a quick run.
    """
    results = read_results(folder)
    if results.get("quick"):
        raise UserError(f"{folder.name} is a quick run; its minutes say nothing about a full one")
    system = read_json(folder / "system.json")
    gpus = ", ".join(gpu["name"] for gpu in system["gpus"])
    machine = gpus or f"{system['cpu']['usable_threads']} threads of {system['cpu']['model']}"
    known = shipped()
    ran = {name: claim for name, claim in results["claims"].items() if claim["verdict"] != Verdict.NOT_RUN.value}
    for name, claim in ran.items():
        kept = {key: claim[key] for key in ("minutes", "peak_bytes", "verdict")}
        known[name] = known.get(name, {}) | {str(results["profile"]): kept | {"machine": machine}}
    write_json(claims.folder() / SHIPPED, {"schema": SCHEMA, "claims": known})


def shipped() -> dict[str, dict[str, dict[str, Any]]]:
    """claims/measured.json: {claim: {profile: {minutes, peak_bytes, verdict, machine}}}; empty when it is absent."""
    path = claims.folder() / SHIPPED
    if not path.is_file():
        return {}
    return dict(read_json(path)["claims"])
