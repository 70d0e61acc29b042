"""Writes every report of a run folder: figures, page, standard records. The same folder gives the same bytes.

A report that cannot be made costs no other one and no verdict; the reason is returned, and a fault of ours leaves its
traceback in the folder's `errors/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from artifact.report.stored import Stored, open_run
from artifact.verify import isolated

if TYPE_CHECKING:
    from paper_tables.plots.render import Plot


def write_reports(folder: Path, missing_tables: dict[str, str] | None = None) -> tuple[list[Path], dict[str, str]]:
    """Write all reports; returns the files and, for what was not made, why. results.json must be there already."""
    from artifact.report import codecheck, html, in_toto, junit, ro_crate

    stored, fault = isolated(partial(open_run, folder), folder, "report")
    if stored is None:
        return [], {"report": fault.reason if fault else "unknown"}
    plots, missing = _figures(folder)
    shown = {f"table {name}": reason for name, reason in (missing_tables or {}).items()}
    shown |= {f"figure {name}": reason for name, reason in missing.items()}
    makers: dict[str, Callable[[Stored], str]] = {
        "junit.xml": junit.render,
        in_toto.NAME: in_toto.render,
        "codecheck.yml": codecheck.render,
        "report.html": partial(html.render, plots=plots, missing=shown),
        ro_crate.NAME: ro_crate.render,  # last: it lists the others with their hashes
    }
    written = [file for plot in plots for file in plot.files]
    for name, make in makers.items():
        path, fault = isolated(partial(_make, stored, name, make), folder, f"report-{Path(name).stem}")
        if path is not None:
            written.append(path)
        elif fault is not None:
            missing[name] = fault.reason
    return written, missing


def write_tables(folder: Path, wanted: list[str] | None = None) -> tuple[list[Path], dict[str, str], bool]:
    """Files written, tables left out with the reason, and whether each of them was left out for a good one.

    A table that cannot be made costs no other one; what its own code raised is kept in the folder's `errors/`.
    """
    from paper_tables.render import render_run, table_names

    written: list[Path] = []
    skipped: dict[str, str] = {}
    sound = True
    for name in wanted or table_names():
        made, fault = isolated(partial(render_run, folder, [name]), folder, f"table-{name}")
        if made is not None:
            written += made[0]
            skipped |= made[1]
        if fault is not None:
            skipped[name], sound = fault.reason, False
    return written, skipped, sound


def _figures(folder: Path) -> tuple[list[Plot], dict[str, str]]:
    from paper_tables.plots.render import plot_names, plot_run

    plots: list[Plot] = []
    missing: dict[str, str] = {}
    for name in plot_names():
        made, fault = isolated(partial(plot_run, folder, [name]), folder, f"figure-{name}")
        if made is not None:
            plots += made[0]
            missing |= made[1]
        if fault is not None:
            missing[name] = fault.reason
    return plots, missing


def _make(stored: Stored, name: str, make: Callable[[Stored], str]) -> Path:
    path = stored.path / name
    text = make(stored)
    scratch = path.with_name(f".{name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path
