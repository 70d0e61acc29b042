"""Table 2 of the SATS paper: perplexity of CATS and SATS at matched sparsity, live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifact.measure import quality
from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("sats_vs_cats",)


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per arm. Raises TableMissing when no window was scored."""
    windows = [row for row in rows if row.get("kind") == "window"]
    if not windows:
        raise TableMissing("no scored windows in this run")
    losses = quality.losses(windows)
    labels = list(dict.fromkeys(row["label"] for row in windows))
    return {
        "rows": [{"label": label, "cells": arm_cells(label, windows, losses)} for label in labels],
        "windows": str(len(losses["dense"])),
        "scored": str(windows[0]["scored"]),
        "text": str(windows[0]["text"]),
    }


def arm_cells(label: str, windows: list[Row], losses: quality.Losses) -> list[Figure]:
    """Realised sparsity, perplexity with its interval and the change against dense."""
    own = [row for row in windows if row["label"] == label]
    origin = own[0]["origin"]
    sparsity = sum(row["counted_sparsity"] for row in own) / len(own)
    ppl, change = quality.perplexity(losses, label), quality.increase(losses, label)
    return [
        Figure(f"{100 * sparsity:.1f}", origin),
        Figure(f"{ppl.point:.2f} [{ppl.low:.2f}, {ppl.high:.2f}]", origin),
        Figure(f"{100 * change.point:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]", origin),
    ]
