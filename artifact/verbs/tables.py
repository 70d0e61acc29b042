"""`artifact tables RUN`: judge a run again from its samples and render its tables; the same bytes every time.

`artifact tables --recorded MACHINE` does so for the runs that ship with the repository; figures are marked as such.
`artifact tables` alone takes the newest run here, and prints the recorded tables where there is none.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from artifact.errors import UserError
from artifact.records import runs_folder
from artifact.verify import derive

Rendered = tuple[list[Path], dict[str, str]]


@click.command("tables")
@click.argument("run", metavar="[RUN]", required=False)
@click.option(
    "--recorded", metavar="MACHINE", help="Render the runs recorded on this machine, shipped with the artifact."
)
@click.option("--table", "wanted", multiple=True, metavar="NAME", help="Only this table; may be repeated.")
def command(run: str | None, recorded: str | None, wanted: tuple[str, ...]) -> int:
    """Derive results and LaTeX tables of the folder RUN again from its raw samples: the newest run by default."""
    from paper_tables.render import render_run

    if run is not None and recorded is not None:
        raise UserError("give either the folder RUN or --recorded MACHINE; `artifact tables --help` explains both")
    tables = list(wanted) or None
    if recorded is not None:
        for name in recorded_names(recorded):
            _report(*_recorded(name, tables, runs_folder() / f"recorded-{name}" / "tables"))
        return 0
    folder = run_folder(run) if run is not None else newest_run()
    if folder is None:
        return _print_recorded(tables)
    derive(folder)
    return _report(*render_run(folder, tables))


def recorded_names(machine: str) -> list[str]:
    """The recorded runs of a machine: the one of that name, or one for each of its models. UserError for none."""
    from paper_tables.recorded import machines

    known = machines()
    names = [name for name in known if name == machine or name.startswith(f"{machine}/")]
    if not names:
        shipped = ", ".join(known) or "none"
        raise UserError(f"no run is recorded for {machine!r}; under paper_tables/recorded there are: {shipped}")
    return names


def newest_run() -> Path | None:
    """The newest run made here, by the time in its name; None before the first one."""
    return max((file.parent for file in runs_folder().glob("[0-9]*/samples.jsonl")), default=None)


def _recorded(name: str, tables: list[str] | None, out: Path) -> Rendered:
    from paper_tables.recorded import opened
    from paper_tables.render import render_run

    with opened(name) as folder:
        return render_run(folder, tables, out=out, origin="recorded")


def _print_recorded(tables: list[str] | None) -> int:
    """The LaTeX of every recorded run on standard output: nothing has to be writable, nothing is left behind."""
    from paper_tables.recorded import machines

    click.echo(
        f"no run in {runs_folder()} yet (`artifact verify-all` makes one): tables of the recorded runs", err=True
    )
    for name in machines():
        with tempfile.TemporaryDirectory(prefix="recorded-") as scratch:
            written, skipped = _recorded(name, tables, Path(scratch))
            for path in written:
                click.echo(f"% {name}: {path.name}\n{path.read_text(encoding='utf-8')}")
        for table, reason in skipped.items():
            click.echo(f"{name}: {table} not made: {reason}", err=True)
    return 0


def _report(written: list[Path], skipped: dict[str, str]) -> int:
    for path in written:
        click.echo(os.path.relpath(path))
    for name, reason in skipped.items():
        click.echo(f"{name} not made: {reason}", err=True)
    return 0


def run_folder(run: str) -> Path:
    """The folder of a run given by path, or by name under the folder of runs. UserError when there is none."""
    for candidate in (Path(run), runs_folder() / run):
        try:
            if (candidate / "samples.jsonl").is_file():
                return candidate
        except (OSError, ValueError):
            continue  # a name that no file system takes
    raise UserError(f"{run} is no run folder: it holds no samples.jsonl; `ls {runs_folder()}` shows the runs made here")
