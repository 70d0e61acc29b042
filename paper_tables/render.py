"""Renders LaTeX tables from the records of a run. Reads samples, results and transcribed figures; measures nothing.

A table NAME is `templates/NAME.tex.j2` with `contexts/NAME.py`, whose `context(rows, results, paper)` returns what
the template prints. `rows` are the stored rows of the claims that the module's CLAIMS names (all claims without it),
`results` is results.json with the system record under "system", `paper` maps each paper's name to its transcription.

Statements are written `((* for row in rows *))`, expressions `((( row.model )))`, comments `((= why =))`. An
expression prints a `Figure`, which carries its origin, or text, which is escaped. A bare number is refused, and so is
a digit in the template.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from artifact.errors import UserError
from artifact.records import read_json, rows_of
from artifact.samples import Row, SampleLog

FOLDER = Path(__file__).resolve().parent
ORIGINS = ("live", "recorded", "paper")
SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
}
# How each origin looks; a paper may redefine the macros. The legend is printed under every table.
PREAMBLE = r"""\providecommand{\fromlive}[1]{#1}
\providecommand{\fromrecorded}[1]{#1\textsuperscript{r}}
\providecommand{\frompaper}[1]{\textit{#1}}
\providecommand{\figurelegend}{%
  upright: measured in this run; \fromrecorded{}: recorded earlier; \frompaper{italic}: printed in the paper}
"""


class TableMissing(Exception):
    """A table whose claims left no rows in this run; the message says which."""


@dataclass(frozen=True)
class Figure:
    """A printed cell: its text, already rounded, and where it comes from."""

    text: str
    origin: str

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(f"the origin of {self.text!r} is {self.origin!r}, not one of {', '.join(ORIGINS)}")

    @property
    def latex(self) -> str:
        """The escaped text inside the macro of its origin."""
        return rf"\from{self.origin}{{{escape(self.text)}}}"


@dataclass(frozen=True)
class Latex:
    """Trusted LaTeX written by our own code, printed as it is. Never built from input."""

    source: str


def escape(text: str) -> str:
    """Text with LaTeX's special characters made harmless; control characters become spaces."""
    return "".join(" " if ord(c) < 32 or ord(c) == 127 else SPECIAL.get(c, c) for c in text)


def printable(value: object) -> str:
    """What an expression may print. TypeError for a bare number or anything else without an origin."""
    if isinstance(value, jinja2.Undefined):
        return str(value)  # StrictUndefined raises here and names the variable
    if isinstance(value, Figure):
        return value.latex
    if isinstance(value, Latex):
        return value.source
    if isinstance(value, str):
        return escape(value)
    raise TypeError(
        f"a table prints Figure or text, not {type(value).__name__} {value!r}: say where the number comes from"
    )


def environment(folder: Path = FOLDER / "templates") -> jinja2.Environment:
    """Jinja2 with delimiters that LaTeX does not use, undefined names as errors and every expression through
    `printable`.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        finalize=printable,
        autoescape=False,  # the escaping of HTML; `printable` escapes for LaTeX
        block_start_string="((*",
        block_end_string="*))",
        variable_start_string="(((",
        variable_end_string=")))",
        comment_start_string="((=",
        comment_end_string="=))",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


# Digits of layout: rules, spans, widths, gaps, label names and the number of a macro's argument.
LAYOUT = re.compile(
    r"\\cmidrule(\([lr]+\))?\{\d+-\d+\}|\\cline\{\d+-\d+\}|\\multi(column|row)\{\d+\}|\\(label|ref|input)\{[^{}]*\}"
    r"|[\d.]+\s*(pt|em|ex|cm|mm|in|\\linewidth|\\textwidth|\\columnwidth)\b|#\d|\\arraystretch\}\{[\d.]+\}"
)


# A number; digits that follow a letter belong to a name, such as that of a GPU.
FIGURE = re.compile(r"(?<![A-Za-z\d])(?<!\d\.)\.?\d\S*")


def typed_figures(source: str) -> list[str]:
    """Digits that a template's author typed, in text or in expressions, other than those of layout. Must be empty."""
    found: list[str] = []
    for _, kind, value in environment().lex(source):
        if kind == "data":
            found += FIGURE.findall(LAYOUT.sub("", value))
        elif kind in ("integer", "float") or (kind == "string" and FIGURE.search(value)):
            found.append(value)
    return found


def table_names(folder: Path = FOLDER / "templates") -> list[str]:
    """All tables with a template, sorted."""
    return sorted(path.name.removesuffix(".tex.j2") for path in folder.glob("*.tex.j2"))


def render(name: str, rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> str:
    """One table as LaTeX source."""
    module = importlib.import_module(f"paper_tables.contexts.{name}")
    template = environment().get_template(f"{name}.tex.j2")
    return PREAMBLE + template.render(module.context(rows, results, paper)).rstrip() + "\n"


def render_run(
    run: Path, wanted: list[str] | None = None, out: Path | None = None, origin: str | None = None
) -> tuple[list[Path], dict[str, str]]:
    """Write `tables/*.tex` of a run; returns the files and, for each table that could not be made, why.

    `out` is another folder for them; `origin` replaces that of the rows, for samples that were recorded earlier.
    """
    names = _known(wanted)
    results = read_json(run / "results.json") | {"system": read_json(run / "system.json")}
    log = SampleLog(run / "samples.jsonl")
    paper = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((FOLDER / "paper").glob("*.json"))
    }
    written: list[Path] = []
    skipped: dict[str, str] = {}
    for name in names:
        try:
            text = render(name, _rows(name, log, origin), results, paper)
        except TableMissing as reason:
            skipped[name] = str(reason)
            continue
        written.append(_write((out or run / "tables") / f"{name}.tex", text))
    return written, skipped


def _known(wanted: list[str] | None) -> list[str]:
    known = table_names()
    for name in wanted or []:
        if name not in known:
            raise UserError(f"no table is called {name!r}; there are {', '.join(known) or 'none'}")
    return wanted or known


def _rows(name: str, log: SampleLog, origin: str | None = None) -> list[Row]:
    """The rows that a table is made of."""
    module = importlib.import_module(f"paper_tables.contexts.{name}")
    claims = getattr(module, "CLAIMS", None) or tuple(log.claims())
    rows = {claim: rows_of(log, claim) for claim in claims}
    if empty := [claim for claim, found in rows.items() if not found]:
        raise TableMissing(f"no samples of {', '.join(empty)} in this run")
    if not rows:
        raise TableMissing("the run has no samples")
    changed = {} if origin is None else {"origin": origin}
    return [row | changed for claim in claims for row in rows[claim]]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
    return path
