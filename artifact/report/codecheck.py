"""codecheck.yml: what a CODECHECK needs from the authors' side, filled from a run (configuration version 1.0).

The codechecker's name and the certificate are theirs to fill in: a run keeps no personal names. Strings are written
as JSON strings, which YAML reads as they are.
"""

from __future__ import annotations

import json
from typing import Any

from artifact import claim as claims
from artifact.report.stored import Stored
from artifact.verify import isolated
from paper_tables.figures import FOLDER, transcript

VERSION = "https://codecheck.org.uk/spec/config/1.0/"


def render(stored: Stored) -> str:
    """The file as YAML."""
    papers = sorted({paper for name in stored.claims if (paper := _paper(name)) is not None})
    described = {
        "version": VERSION,
        "paper": {
            "title": "; ".join(_title(paper) for paper in papers) or "no paper",
            "authors": [{"name": "as listed in the paper"}],
            "reference": "REPRODUCE.md",
        },
        "manifest": [{"file": name, "comment": comment} for name, comment in _manifest(stored)],
        "codechecker": [{"name": "to be named by whoever checks: a run keeps no personal names"}],
        "report": "report.html",
        "summary": _summary(stored),
    }
    if stored.started:
        described["check_time"] = stored.started
    return "---\n" + _yaml(described) + "\n"


def _manifest(stored: Stored) -> list[tuple[str, str]]:
    """Every output that a checker compares with the paper."""
    found = [("results.json", "verdict, interval and acceptance region of every predicate")]
    found += [(f"tables/{path.name}", f"LaTeX table {path.stem}") for path in sorted(stored.path.glob("tables/*.tex"))]
    figures = sorted(stored.path.glob("figures/*.pdf"))
    return found + [(f"figures/{path.name}", f"figure {path.stem}") for path in figures]


def _summary(stored: Stored) -> str:
    verdicts = [claim["verdict"] for claim in stored.claims.values()]
    counted = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))
    return f"{len(verdicts)} claims on {stored.machine}, profile {stored.profile.name}: {counted or 'none'}"


def _paper(name: str) -> str | None:
    module, _ = isolated(lambda: claims.load(name), None, name)
    return None if module is None else module.claim.paper


def _title(paper: str) -> str:
    return str(transcript(paper)["title"]) if (FOLDER / f"{paper}.json").is_file() else paper


def _yaml(value: Any, indent: str = "") -> str:
    """Mappings and lists in block style, strings as JSON strings."""
    if isinstance(value, dict):
        return "\n".join(f"{indent}{key}:{_nested(item, indent)}" for key, item in value.items())
    return "\n".join(f"{indent}- {_yaml(item, indent + '  ').lstrip()}" for item in value)


def _nested(item: Any, indent: str) -> str:
    return " " + json.dumps(item) if isinstance(item, str) else "\n" + _yaml(item, indent + "  ")
