"""Writes `figures/*.pdf` and `*.png` of a run from its stored rows; the same rows give the same bytes.

A figure NAME is `paper_tables/plots/NAME.py` with TITLE, the claims whose rows it needs (CLAIMS) or can use (OPTIONAL)
and `draw(rows, results, figure)`, which returns its text alternative or raises TableMissing with the reason.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from artifact.errors import UserError
from artifact.records import read_json, rows_of
from artifact.samples import Row, SampleLog
from paper_tables.render import TableMissing

FOLDER = Path(__file__).resolve().parent
FORMATS = ("pdf", "png")


@dataclass(frozen=True)
class Plot:
    """A written figure: its files, its title and what it shows in words."""

    name: str
    title: str
    alt: str
    files: tuple[Path, ...]


def plot_names() -> list[str]:
    """All figures, sorted."""
    return sorted(path.stem for path in FOLDER.glob("figure*.py"))


def load(name: str) -> ModuleType:
    """The module of a figure."""
    return importlib.import_module(f"paper_tables.plots.{name}")


def figures_of(claim: str) -> list[str]:
    """Names of the figures that can be drawn from a claim's rows."""
    return [name for name in plot_names() if claim in load(name).CLAIMS + load(name).OPTIONAL]


def plot_run(run: Path, wanted: list[str] | None = None) -> tuple[list[Plot], dict[str, str]]:
    """Draw the figures of a run; returns them and, for each that could not be drawn, why."""
    known = plot_names()
    for name in wanted or []:
        if name not in known:
            raise UserError(f"no figure is called {name!r}; there are {', '.join(known)}")
    results = read_json(run / "results.json")
    log = SampleLog(run / "samples.jsonl")
    plots: list[Plot] = []
    skipped: dict[str, str] = {}
    for name in wanted or known:
        module = load(name)
        try:
            contents, alt = plot(module, _rows(module, log), results)
        except TableMissing as reason:
            skipped[name] = str(reason)
            continue
        files = tuple(_write(run / "figures" / f"{name}.{kind}", contents[kind]) for kind in FORMATS)
        plots.append(Plot(name, module.TITLE, alt, files))
    return plots, skipped


def plot(module: ModuleType, rows: list[Row], results: Mapping[str, Any]) -> tuple[dict[str, bytes], str]:
    """The bytes of one figure by format, and its text alternative."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from paper_tables.plots import style

    contents = {}
    # Everything from matplotlib's defaults: a user's own settings must not change the bytes.
    settings: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"} | style.RC
    with matplotlib.rc_context(settings):
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        alt = module.draw(rows, results, figure)
        for kind in FORMATS:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=style.NO_DATES[kind])
            contents[kind] = buffer.getvalue()
    return contents, alt


def _rows(module: ModuleType, log: SampleLog) -> list[Row]:
    """The rows that a figure may use."""
    found = {claim: rows_of(log, claim) for claim in (*module.CLAIMS, *module.OPTIONAL)}
    if empty := [claim for claim in module.CLAIMS if not found[claim]]:
        raise TableMissing(f"no samples of {', '.join(empty)} in this run")
    if not any(found.values()):
        raise TableMissing(f"no samples of {' or '.join(module.OPTIONAL)} in this run")
    return [row for rows in found.values() for row in rows]


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    os.replace(scratch, path)
    return path
