"""Seeded faults of `selection_cost`, on made-up times of the pass and of the steps."""

from __future__ import annotations

from typing import Any

from artifact.profiles import Profile

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)

Row = dict[str, Any]


def honest() -> list[Row]:
    """One pass costs 60 ms per 1K tokens and saves 1.2 ms per 1K tokens and step: repaid after 50 tokens."""
    rows: list[Row] = []
    for block in range(4):
        cell = {"cell": f"sweep-{block}", "block": block}
        for context in (2048, 4096, 7936):
            k, drift = context / 1024, 1 + 0.01 * block
            rows.append({**cell, "kind": "selection", "context": context, "r_kv": 0.3, "once_ms": [60 * k * drift] * 4})
            for mode, slope in (("dense", 1.7), ("kv", 0.5)):
                ms = [20 + slope * k] * 12
                rows.append({**cell, "kind": "step", "group": 0, "context": context, "mode": mode, "ms": ms})
    return rows


def slow_selection(rows: list[Row]) -> None:
    """The pass scores every query instead of the last rows."""
    for row in rows:
        if row["kind"] == "selection":
            row["once_ms"] = [value * 10 for value in row["once_ms"]]


def nothing_saved(rows: list[Row]) -> None:
    """A KV mode that silently ran dense."""
    for row in rows:
        if row["kind"] == "step":
            row["ms"] = [20 + 1.7 * row["context"] / 1024] * 12


def one_length_slow(rows: list[Row]) -> None:
    """At one length the pass compiles inside the clock."""
    for row in rows:
        if row["kind"] == "selection" and row["context"] == 2048:
            row["once_ms"] = [value * 10 for value in row["once_ms"]]


def unequal_arms(rows: list[Row]) -> None:
    """One step of the KV mode is lost."""
    next(row for row in rows if row["kind"] == "step" and row["mode"] == "kv")["ms"].pop()


UNEQUAL = unequal_arms
FAULTS = (slow_selection, nothing_saved, one_length_slow, unequal_arms)
