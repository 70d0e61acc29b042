"""`artifact selftest`: put known faults into honest rows and into the engine, and see that no verdict survives them.

The faults lie beside the tests, in `tests/faults/`, one file per claim; nothing here measures this machine. The last
line of standard output is one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from artifact import claim as claims
from artifact.errors import UserError
from artifact.verify import EXIT_CONTRADICTED, EXIT_ERROR, EXIT_OK

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "faults"
PACKAGE = "seeded_faults"
LEAST = 2  # faults per claim


@click.command("selftest")
@click.argument("names", nargs=-1, metavar="[CLAIM]...")
@click.option("--json", "as_json", is_flag=True, help="Only the JSON line on standard output.")
def command(names: tuple[str, ...], as_json: bool) -> int:
    """Run the seeded faults of every claim, or of the named ones.

    Exit codes: 0 every fault turns its claim away from `reproduced` and honest rows do not; 1 a fault went unnoticed or
    a claim has fewer than two; 4 a claim does not reproduce its honest rows.
    """
    faults = load()
    for name in names:
        claims.load(name)  # raises the sentence about unknown names
    wanted = list(names) or claims.names()
    known = set(faults.names())
    found = [] if names else [("engine", importlib.import_module(f"{PACKAGE}._engine").trials())]
    found += [(name, faults.trials(faults.suite(name))) for name in wanted if name in known]
    missing = [name for name in wanted if name not in known]
    missing += [name for name, trials in found if sum(bool(trial.fault) for trial in trials) < LEAST]
    everything = [trial for _, trials in found for trial in trials]
    if not as_json:
        for _, trials in found:
            _print(trials)
        for name in missing:
            click.echo(f"{name}: fewer than {LEAST} seeded faults")
    unnoticed = [f"{t.claim}: {t.what}" for t in everything if t.fault and not t.as_it_must_be]
    broken = [t.claim for t in everything if not t.fault and not t.as_it_must_be]
    total = sum(bool(trial.fault) for trial in everything)
    summary = {"faults": total, "unnoticed": unnoticed, "missing": missing, "not_reproduced": broken}
    click.echo(json.dumps(summary, separators=(",", ":"), sort_keys=True))
    if broken:
        return EXIT_ERROR
    return EXIT_CONTRADICTED if unnoticed or missing else EXIT_OK


def load(folder: Path = FOLDER) -> ModuleType:
    """The package of seeded faults, by its place. UserError in an installation without the tests."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if not (folder / "__init__.py").is_file() or spec is None or spec.loader is None:
        raise UserError("selftest needs the folder tests/faults of a checkout; this installation has none")
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]  # another folder's
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    return module


def _print(trials: Sequence[Any]) -> None:
    click.echo(trials[0].claim)
    for trial in trials:
        mark = "ok    " if trial.as_it_must_be else "FAILED"
        noticed = trial.noticed if len(trial.noticed) <= 90 else trial.noticed[:87] + "..."
        click.echo(f"  {mark} {trial.what:<86} {trial.verdict.value:<13} {noticed}".rstrip())
