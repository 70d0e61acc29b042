"""`artifact report RUN`: everything that is derived from a run, written again; with --pdf also one printed document."""

from __future__ import annotations

import os

import click

from artifact.errors import UserError
from artifact.verbs.tables import run_folder
from artifact.verify import derive


@click.command("report")
@click.argument("run", metavar="RUN")
@click.option("--pdf", is_flag=True, help="Also report.pdf: verdicts, tables and figures through LaTeX.")
def command(run: str, pdf: bool) -> int:
    """Derive verdicts, tables, figures, page and standard records of the folder RUN again from its raw samples."""
    from artifact.report.write import write_reports, write_tables

    folder = run_folder(run)
    try:
        derive(folder)
        tables, skipped, _ = write_tables(folder)
        written, missing = write_reports(folder, skipped)
        if pdf:
            from artifact.report.pdf import write_pdf

            written.append(write_pdf(folder))
    except OSError as error:
        raise UserError(f"reports cannot be written to {run} ({error.strerror}); copy the run and try there") from None
    for path in (*tables, *written):
        click.echo(os.path.relpath(path))
    for name, reason in (skipped | missing).items():
        click.echo(f"{name} not made: {reason}", err=True)
    return 0
