"""Table 7 of the SATS paper: throughput of the fine-tuned model, its update fused, apart and routed, live, in every
format that was timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_tables.contexts.sats_table6 import settings_of, speed_cells
from paper_tables.render import Row, TableMissing

CLAIMS = ("sats_finetuned",)


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per timed arm. Raises TableMissing when no step was timed."""
    timed = [row for row in rows if row.get("kind") == "timing"]
    if not timed:
        raise TableMissing("no timed steps in this run")
    settings = settings_of(timed)
    labels = list(dict.fromkeys(row["label"] for row in timed))
    return {
        "rows": [{"label": label, "cells": speed_cells(label, timed, settings)} for label in labels],
        "settings": [f"{model}, {dtype}" for model, dtype in settings],
        "context": str(timed[0]["context"]),
        "text": str(timed[0]["text"]),
    }
