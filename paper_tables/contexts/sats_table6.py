"""Table 6 of the SATS paper: quality and throughput of token routing, live, timed in float32 where that was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifact.measure import quality
from artifact.measure.masked_plan import FORMATS
from artifact.stats import trimmed_mean
from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("token_routing",)
Setting = tuple[str, str]


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """Arms with perplexity, share and, where they were timed, tokens per second. TableMissing without timed steps."""
    windows = [row for row in rows if row.get("kind") == "window"]
    timed = [row for row in rows if row.get("kind") == "timing"]
    if not timed:
        raise TableMissing("no timed steps in this run")
    dtype = FORMATS[0] if any(row["dtype"] == FORMATS[0] for row in timed) else str(timed[0]["dtype"])
    timed = [row for row in timed if row["dtype"] == dtype]
    losses = quality.losses(windows)
    settings = settings_of(timed)
    labels = list(dict.fromkeys(row["label"] for row in [*windows, *timed]))
    return {
        "rows": [
            {"label": label, "cells": [*_quality(label, windows, losses), *speed_cells(label, timed, settings)]}
            for label in labels
        ],
        "models": [model for model, _ in settings],
        "dtype": dtype,
        "context": str(timed[0]["context"]),
        "text": str(timed[0]["text"]),
    }


def _quality(label: str, windows: list[Row], losses: quality.Losses) -> list[Figure]:
    own = [row for row in windows if row["label"] == label]
    if not own:
        return [Figure("--", "live"), Figure("--", "live")]
    share = sum(row["masked_share"] for row in own) / len(own)
    ppl = quality.perplexity(losses, label)
    return [Figure(f"{100 * share:.0f}", own[0]["origin"]), Figure(f"{ppl.point:.2f}", own[0]["origin"])]


def settings_of(timed: list[Row]) -> list[Setting]:
    """Models and formats of their weights, in the order of the rows."""
    return list(dict.fromkeys((row["model"], row["dtype"]) for row in timed))


def speed_cells(label: str, timed: list[Row], settings: list[Setting], without: str = "--") -> list[Figure]:
    """Per setting tokens per second and speedup over dense, from trimmed means of paired steps."""
    cells = []
    for setting in settings:
        here = [row for row in timed if (row["model"], row["dtype"]) == setting]
        own = [row for row in here if row["label"] == label]
        if not own:
            cells += [Figure(without, timed[0]["origin"])] * 2
            continue
        base = {row["block"]: row["ms"] for row in here if row["label"] == "dense"}
        pairs = [(d, o) for row in own for d, o in zip(base[row["block"]], row["ms"], strict=True)]
        rate, gain = 1000 / trimmed_mean([o for _, o in pairs]), 1 / trimmed_mean([o / d for d, o in pairs])
        cells += [Figure(f"{rate:.1f}", own[0]["origin"]), Figure(f"{gain:.2f}", own[0]["origin"])]
    return cells
