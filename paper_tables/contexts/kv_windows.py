"""Rows that the CateKV and SparK quality tables share: perplexity of every arm beside what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from artifact.judge.kv_judge import windows_of
from artifact.measure import quality
from paper_tables.render import Figure, Row, TableMissing


def perplexity_rows(rows: list[Row]) -> list[dict[str, object]]:
    """One row per arm in stored order: kept share, perplexity, increase over dense on the same windows.

    Raises TableMissing when no window was scored.
    """
    found: dict[str, dict[str, object]] = {}
    for windows in windows_of(rows):
        losses = quality.losses(windows)
        for label in dict.fromkeys(str(row["label"]) for row in windows):
            found.setdefault(label, {"label": label, "cells": _cells(label, windows, losses)})
    if not found:
        raise TableMissing("no scored windows in this run")
    return list(found.values())


def _cells(label: str, windows: Sequence[Mapping[str, Any]], found: quality.Losses) -> list[Figure]:
    own = [row for row in windows if row["label"] == label]
    origin, change = own[0]["origin"], quality.increase(found, label)
    share = mean(float(row["kept_share"]) for row in own)
    kept = "simulated" if own[0]["simulated"] else f"{share:.1%}"
    return [
        Figure(kept, origin),
        Figure(f"{quality.perplexity(found, label).point:.2f}", origin),
        Figure(f"{change.point:+.1%} [{change.low:+.1%}, {change.high:+.1%}]", origin),
    ]
