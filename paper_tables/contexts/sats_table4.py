"""Table 4 of the SATS paper: perplexity before and after LoRA fine-tuning, live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifact.measure import quality
from paper_tables.contexts.sats_table2 import arm_cells
from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("sats_finetuned",)


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per arm, with the training that it had. Raises TableMissing when no window was scored."""
    windows = [row for row in rows if row.get("kind") == "window"]
    if not windows:
        raise TableMissing("no scored windows in this run")
    losses = quality.losses(windows)
    trained = {f"{row['label']}-lora": row for row in rows if row.get("kind") == "adapter"}
    found = []
    for label in dict.fromkeys(row["label"] for row in windows):
        tokens = f"{trained[label]['tokens_seen']:,}" if label in trained else "--"
        cells = [*arm_cells(label, windows, losses), Figure(tokens, windows[0]["origin"])]
        found.append({"label": label, "cells": cells})
    return {
        "rows": found,
        "windows": str(len(losses["dense"])),
        "scored": str(windows[0]["scored"]),
        "text": str(windows[0]["text"]),
    }
