"""Rows that the CateKV and SparK quality tables share: perplexity of every arm beside what it keeps."""

from __future__ import annotations

from statistics import mean

from artifact import quality
from paper_tables.render import Figure, Row, TableMissing


def perplexity_rows(rows: list[Row]) -> list[dict[str, object]]:
    """One row per arm in stored order: kept share, perplexity, increase over dense with its interval.

    Raises TableMissing when no window was scored.
    """
    windows = [row for row in rows if row.get("kind") == "window"]
    if not windows:
        raise TableMissing("no scored windows in this run")
    found = quality.losses(windows)
    labels = list(dict.fromkeys(row["label"] for row in windows))
    return [{"label": label, "cells": _cells(label, windows, found)} for label in labels]


def _cells(label: str, windows: list[Row], found: quality.Losses) -> list[Figure]:
    own = [row for row in windows if row["label"] == label]
    origin, change = own[0]["origin"], quality.increase(found, label)
    share = mean(float(row["kept_share"]) for row in own)
    kept = "simulated" if own[0]["simulated"] else f"{share:.1%}"
    return [
        Figure(kept, origin),
        Figure(f"{quality.perplexity(found, label).point:.2f}", origin),
        Figure(f"{change.point:+.1%} [{change.low:+.1%}, {change.high:+.1%}]", origin),
    ]
