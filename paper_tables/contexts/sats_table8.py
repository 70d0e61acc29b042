"""Table 8 of the SATS paper: throughput of token routing with bfloat16 weights beside that with float32 ones, live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifact.measure.masked_plan import FORMATS
from paper_tables.contexts.sats_table6 import speed_cells
from paper_tables.render import Row, TableMissing

CLAIMS = ("token_routing",)
MISSING = "not measured"


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per model and timed arm, two columns per format. Raises TableMissing when no step was timed."""
    timed = [row for row in rows if row.get("kind") == "timing"]
    if not timed:
        raise TableMissing("no timed steps in this run")
    found = []
    for model in dict.fromkeys(row["model"] for row in timed):
        own = [row for row in timed if row["model"] == model]
        for label in dict.fromkeys(row["label"] for row in own):
            cells = speed_cells(label, own, [(model, dtype) for dtype in FORMATS], MISSING)
            shown = [MISSING if cell.text == MISSING else cell for cell in cells]  # no figure, so without an origin
            found.append({"label": label, "model": str(model), "cells": shown})
    reasons = [str(row["reason"]) for row in rows if row.get("kind") == "no-room"]
    if not any(row["dtype"] == FORMATS[-1] for row in timed) and not reasons:
        reasons = ["the kernels of this profile hold float32 weights alone"]
    return {
        "rows": found,
        "formats": list(FORMATS),
        "context": str(timed[0]["context"]),
        "text": str(timed[0]["text"]),
        "reasons": "; ".join(reasons),
    }
