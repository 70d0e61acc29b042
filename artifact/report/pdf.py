"""report.pdf: verdicts, tables and figures of a run in one document, through the LaTeX that is installed.

The source, report.tex, is kept beside it. Dates come from the run, so the same run gives the same bytes.
"""

from __future__ import annotations

import calendar
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from artifact.errors import UserError
from artifact.report.numbers import accepted_text, measured_text
from artifact.report.stored import Stored, flat, open_run
from paper_tables.plots.render import load, plot_names
from paper_tables.render import escape

ENGINE = "pdflatex"
PACKAGES = "texlive-latex-recommended texlive-latex-extra lmodern"
TIMEOUT_S = 180
# What pdfLaTeX's own encodings lack, in the words of ASCII; anything else outside Latin-1 becomes a question mark.
PLAIN = {
    "–": "--",
    "—": "---",
    "−": "-",
    "’": "'",
    "‘": "`",
    "“": '"',
    "”": '"',
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "…": "...",
}
HEAD = r"""\documentclass[10pt]{article}
\usepackage[a4paper,margin=20mm]{geometry}
\usepackage[T1]{fontenc}
\usepackage[table]{xcolor}
\usepackage{adjustbox,etoolbox}
\usepackage{lmodern,booktabs,longtable,array,graphicx,amsmath}
\usepackage[hidelinks,pdfusetitle]{hyperref}
\newcolumntype{L}[1]{>{\raggedright\arraybackslash}p{#1}}
% a table in its own size, or as wide as the text
\BeforeBeginEnvironment{tabular}{\begin{adjustbox}{max width=\linewidth}}
\AfterEndEnvironment{tabular}{\end{adjustbox}}
% a figure in its own size, or as wide as the text
\newcommand{\fitted}[1]{\sbox0{\includegraphics{#1}}%
  \ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi}
\title{Claims about sparse decoding, checked}
\date{}
\begin{document}
\maketitle
"""


def write_pdf(folder: Path) -> Path:
    """Compile and return report.pdf. UserError when LaTeX or a package of it is missing, or the compilation fails."""
    if shutil.which(ENGINE) is None:
        raise UserError(f"report.pdf needs {ENGINE}, which is not installed: apt-get install {PACKAGES}")
    stored = open_run(folder)
    source = folder / "report.tex"
    source.write_text(document(stored), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="report-") as scratch:
        for part in ("tables", "figures"):
            if (folder / part).is_dir():
                shutil.copytree(folder / part, Path(scratch) / part)
        shutil.copyfile(source, Path(scratch) / source.name)
        for _ in range(2):  # the second pass knows the widths of long tables and the targets of references
            _compile(Path(scratch), source.name, stored.started)
        shutil.copyfile(Path(scratch) / "report.pdf", folder / "report.pdf")
    return folder / "report.pdf"


def document(stored: Stored) -> str:
    """The LaTeX source: it inputs tables and figures of the folder by relative path."""
    parts = [HEAD, _text(f"{stored.machine}, model {stored.results['model']}, profile {stored.profile.name}") + "\n"]
    parts += [_text(f"Started {stored.started}.{' Quick run.' if stored.quick else ''}\n")] if stored.started else []
    parts += [_claim(name, claim) for name, claim in stored.claims.items()]
    tables = sorted(stored.path.glob("tables/*.tex"))
    parts += [_numbered("table", path.stem) + rf"\input{{tables/{path.name}}}" + "\n" for path in tables]
    parts += [_figure(path) for path in sorted(stored.path.glob("figures/*.pdf"))]
    parts += [_system(stored), "\\end{document}\n"]
    return "\n".join(parts)


def _claim(name: str, claim: Mapping[str, Any]) -> str:
    rows = [
        " & ".join(
            _text(cell)
            for cell in (
                finding["statement"],
                finding["paper_value"] or "-",
                measured_text(finding),
                accepted_text(finding),
                finding["verdict"],
            )
        )
        + r" \\"
        for finding in claim["findings"]
    ]
    heading = rf"\section*{{{_text(name)}: {_text(claim['verdict'])}}}" + "\n" + _text(claim["reason"])
    if not rows:
        return heading + "\n"
    head = r"Predicate & Paper & This run & Accepted & Verdict \\"
    table = [
        r"{\footnotesize\begin{longtable}{L{58mm}L{28mm}L{32mm}L{24mm}l}",
        rf"\toprule {head} \midrule\endhead",
        *rows,
        r"\bottomrule\end{longtable}}",
    ]
    return heading + "\n" + "\n".join(table) + "\n"


def _figure(path: Path) -> str:
    title = load(path.stem).TITLE if path.stem in plot_names() else path.stem
    lines = [r"\begin{figure}\centering", rf"\fitted{{figures/{path.name}}}", rf"\caption{{{_text(title)}}}"]
    return _numbered("figure", path.stem) + "\n".join([*lines, r"\end{figure}", ""])


def _numbered(kind: str, name: str) -> str:
    """Give the next table or figure the number that it has in the paper, which its name ends with."""
    number = name.removeprefix(kind)
    return rf"\setcounter{{{kind}}}{{{int(number) - 1}}}" + "\n" if number.isdecimal() else ""


def _system(stored: Stored) -> str:
    facts = flat({key: value for key, value in stored.system.items() if key != "schema"})
    rows = "\n".join(rf"{_text(name)} & {_text(value)} \\" for name, value in facts.items())
    table = r"{\footnotesize\begin{longtable}{L{50mm}L{110mm}}" + "\n" + rows + "\n" + r"\end{longtable}}"
    return "\\section*{The machine}\n" + table + "\n"


def _text(value: str) -> str:
    plain = "".join(PLAIN.get(c, c) for c in value)
    return escape(plain.encode("latin-1", "replace").decode("latin-1"))


def _compile(folder: Path, source: str, started: str) -> None:
    """One pass, with every date set to the run's and no shell escape."""
    seconds = calendar.timegm(time.strptime(started, "%Y-%m-%dT%H:%M:%SZ")) if started else 0
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(seconds), "FORCE_SOURCE_DATE": "1", "openin_any": "p"}
    command = [ENGINE, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", source]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{ENGINE} did not finish report.tex within {TIMEOUT_S} s; compile it by hand") from None
    if done.returncode == 0:
        return
    log = done.stdout.decode("utf-8", "replace")
    if missing := re.search(r"File `([^']+)' not found", log):
        raise UserError(f"report.pdf needs the LaTeX file {missing[1]}: apt-get install {PACKAGES}")
    first = next((line for line in log.splitlines() if line.startswith("!")), "no message")
    raise UserError(f"{ENGINE} stopped at report.tex: {first}; the source is kept in the run folder")
