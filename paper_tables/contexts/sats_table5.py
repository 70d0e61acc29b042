"""Table 5 of the SATS paper: perplexity of the same arms with float32 and bfloat16 weights, live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifact.judge import formats
from artifact.measure import quality
from artifact.measure.masked_plan import FORMATS
from artifact.stats import Interval
from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("sats_vs_cats",)


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per arm. Raises TableMissing when one of the formats was not scored."""
    found = formats.by_format(rows)
    if missing := [name for name in FORMATS if name not in found]:
        raise TableMissing(f"no windows were scored in {' and '.join(missing)}")
    scored = [row for row in rows if row.get("kind") == "format"]
    changes = formats.changes(found)
    return {
        "rows": [
            {"label": label, "cells": _cells(label, found, changes[label], scored[0]["origin"])} for label in changes
        ],
        "formats": list(FORMATS),
        "windows": str(len(found[FORMATS[0]]["dense"])),
        "scored": str(scored[0]["scored"]),
        "text": str(scored[0]["text"]),
    }


def _cells(label: str, found: dict[str, quality.Losses], change: Interval, origin: str) -> list[Figure]:
    """Perplexity in every format with its interval, and the change between them, windows paired."""
    cells = []
    for name in FORMATS:
        ppl = quality.perplexity(found[name], label)
        cells.append(Figure(f"{ppl.point:.2f} [{ppl.low:.2f}, {ppl.high:.2f}]", origin))
    cells.append(Figure(f"{100 * change.point:+.2f} [{100 * change.low:+.2f}, {100 * change.high:+.2f}]", origin))
    return cells
