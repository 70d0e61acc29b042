"""`artifact tables RUN`: judge a run again from its samples and render its tables; the same bytes every time."""

from __future__ import annotations

import os
from pathlib import Path

import click

from artifact.errors import UserError
from artifact.verify import derive


@click.command("tables")
@click.argument("run", metavar="RUN")
@click.option("--table", "wanted", multiple=True, metavar="NAME", help="Only this table; may be repeated.")
def command(run: str, wanted: tuple[str, ...]) -> int:
    """Derive results and LaTeX tables of the folder RUN again from its raw samples."""
    from paper_tables.render import render_run

    folder = run_folder(run)
    derive(folder)
    written, skipped = render_run(folder, list(wanted) or None)
    for path in written:
        click.echo(os.path.relpath(path))
    for name, reason in skipped.items():
        click.echo(f"{name} not made: {reason}", err=True)
    return 0


def run_folder(run: str) -> Path:
    """The folder of a run given by path, or by name under runs/. UserError when there is none."""
    for candidate in (Path(run), Path("runs") / run):
        if (candidate / "samples.jsonl").is_file():
            return candidate
    raise UserError(f"{run} is no run folder: it holds no samples.jsonl; `ls runs` shows the runs made here")
