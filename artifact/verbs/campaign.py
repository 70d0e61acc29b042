"""`artifact campaign NAME... --run DIR`: measure only, as long as the budget lasts; call again to go on.

Every finished cell is kept with its checksum, so a campaign may be killed at any moment and resumed by the same
command: finished cells are not measured again, a cell that was cut short is. No new cell is begun when the slowest so
far would not fit into what is left of the budget. Verdicts come afterwards, from `artifact verify --run DIR` or
`artifact tables DIR`. With `--executor ray` the cells of a claim run side by side on a cluster (`examples/`).
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from artifact import campaign, profiles, system
from artifact import claim as claims
from artifact.claim import NotRun
from artifact.errors import UserError
from artifact.profiles import Profile
from artifact.records import Cell, CellError, CellResult, Run
from artifact.verify import EXIT_ERROR, EXIT_INCOMPLETE, EXIT_OK

if TYPE_CHECKING:
    from artifact.ray_executor import RayExecutor


class BudgetSpent(Exception):
    """The next cell would probably not end in time."""


class Budget:
    """Runs cells as `campaign.run_local` does, until the seconds are nearly spent."""

    def __init__(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.measured = 0
        self._slowest_s = 0.0

    def __call__(self, cell: Cell, profile: Profile, run: Run) -> CellResult:
        """Measure one cell. Raises BudgetSpent before a cell that the slowest so far says would not fit."""
        if self._deadline is not None and time.monotonic() + self._slowest_s > self._deadline:
            raise BudgetSpent
        begin = time.monotonic()
        result = campaign.run_local(cell, profile, run)
        self.measured += 1
        self._slowest_s = max(self._slowest_s, time.monotonic() - begin)
        return result


def _ray(address: str | None) -> RayExecutor:
    from artifact.ray_executor import RayExecutor

    return RayExecutor(address)


@click.command("campaign")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--run", "run_path", required=True, metavar="DIR", help="The run folder to make or to go on with.")
@click.option("--profile", type=click.Choice(profiles.NAMES), help="embedded (CPU), gpu or paper; default by machine.")
@click.option("--model", metavar="PATH", help="A directory, a GGUF file, or the name of known dimensions.")
@click.option("--text", metavar="FILE", help="A text file instead of the profile's text.")
@click.option("--executor", type=click.Choice(["local", "ray"]), default="local", help="Where cells run.")
@click.option(
    "--address", metavar="A", help="With --executor ray: the cluster to join, such as auto or ray://HOST:10001."
)
@click.option("--budget-s", type=click.FloatRange(min=1), help="Stop before a cell that would end after this many s.")
def command(
    names: tuple[str, ...],
    run_path: str,
    profile: str | None,
    model: str | None,
    text: str | None,
    executor: str,
    address: str | None,
    budget_s: float | None,
) -> int:
    """Measure the cells of the named claims, resumably, without judging them.

    Exit codes: 0 every cell is measured; 3 the budget is spent or a claim does not apply here, go on with the same
    command; 4 a cell failed; 130 interrupted, nothing finished is lost.
    """
    if executor == "local" and address is not None:
        raise UserError("--address names a Ray cluster; add --executor ray")
    if executor == "ray" and budget_s is not None:
        raise UserError("--budget-s stops between the cells of one machine; leave it out with --executor ray")
    modules = [claims.load(name) for name in dict.fromkeys(names)]
    code = EXIT_OK
    with Run(Path(run_path), profiles.choose(profile, model, text), budget_s=budget_s) as run, ExitStack() as stack:
        if not (run.path / "system.json").exists():
            run.write_json("system.json", system.describe())
        budget = Budget(budget_s)
        run.executor = budget
        if executor == "ray":
            from artifact.report import console

            run.many = stack.enter_context(closing(_ray(address)))
            run.progress = console.progress()
            stack.callback(run.progress.close)
        for module in modules:
            run.start_claim(module.claim.name, module.source)
            try:
                module.measure(run)
                click.echo(f"{module.claim.name}: all cells are measured")
            except NotRun as reason:
                click.echo(f"{module.claim.name}: not measured here, {reason}")
                code = max(code, EXIT_INCOMPLETE)
            except CellError as error:
                click.echo(f"{module.claim.name}: {error}", err=True)
                code = EXIT_ERROR
            except BudgetSpent:
                click.echo(f"{module.claim.name}: the budget of {budget_s:g} s is spent; the same command goes on")
                code = max(code, EXIT_INCOMPLETE)
                break
        measured = f"{budget.measured} cells measured in this call, " if executor == "local" else ""
        click.echo(f"{measured}kept in {run_path}")
    return code
