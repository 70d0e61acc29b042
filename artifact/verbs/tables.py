"""`artifact tables RUN`: judge a run again from its samples and render its tables; the same bytes every time.

`artifact tables --recorded MACHINE` does so for a run that ships with the repository; its figures are marked as such.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from artifact.errors import UserError
from artifact.verify import derive


@click.command("tables")
@click.argument("run", metavar="[RUN]", required=False)
@click.option(
    "--recorded", metavar="MACHINE", help="Render the run recorded on this machine, shipped with the artifact."
)
@click.option("--table", "wanted", multiple=True, metavar="NAME", help="Only this table; may be repeated.")
def command(run: str | None, recorded: str | None, wanted: tuple[str, ...]) -> int:
    """Derive results and LaTeX tables of the folder RUN again from its raw samples."""
    from paper_tables.recorded import opened
    from paper_tables.render import render_run

    if (run is None) == (recorded is None):
        raise UserError("give either the folder RUN or --recorded MACHINE; `artifact tables --help` explains both")
    if recorded is not None:
        with opened(recorded) as folder:
            out = Path("runs") / f"recorded-{recorded}" / "tables"
            return _report(*render_run(folder, list(wanted) or None, out=out, origin="recorded"))
    folder = run_folder(run or "")
    derive(folder)
    return _report(*render_run(folder, list(wanted) or None))


def _report(written: list[Path], skipped: dict[str, str]) -> int:
    for path in written:
        click.echo(os.path.relpath(path))
    for name, reason in skipped.items():
        click.echo(f"{name} not made: {reason}", err=True)
    return 0


def run_folder(run: str) -> Path:
    """The folder of a run given by path, or by name under runs/. UserError when there is none."""
    for candidate in (Path(run), Path("runs") / run):
        try:
            if (candidate / "samples.jsonl").is_file():
                return candidate
        except (OSError, ValueError):
            continue  # a name that no file system takes
    raise UserError(f"{run} is no run folder: it holds no samples.jsonl; `ls runs` shows the runs made here")
