"""CateKV's cache and steps: live figures beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("catekv_efficiency",)


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """Dense and CateKV side by side. Raises TableMissing when no step was timed."""
    timed = [row for row in rows if row.get("kind") == "timing"]
    account = next((row for row in rows if row.get("kind") == "account"), None)
    if not timed or account is None:
        raise TableMissing("no timed steps in this run")
    figures, origin = paper["catekv"]["figures"], timed[0]["origin"]
    arms = {label: [row for row in timed if row["label"] == label] for label in ("dense", "catekv")}
    if not all(arms.values()):
        raise TableMissing("one of the two modes was not timed")
    ms = {label: median(value for row in own for value in row["ms"]) for label, own in arms.items()}
    held = {label: own[0]["storage_bytes"] for label, own in arms.items()}
    read = {label: own[0]["kv_bytes"] for label, own in arms.items()}
    exact, printed = account["origin"], {key: Figure(f"{value['printed']}x", "paper") for key, value in figures.items()}
    return {
        "context": Figure(f"{timed[0]['context']:,}", origin),
        "text": str(timed[0]["text"]),
        "rows": [
            _line(
                "cache held", held, 1e6, "MB", origin, f"{account['memory_bound']:.2f}x", exact, printed["memory.llama"]
            ),
            _line("cache read per step", read, 1e6, "MB", origin, f"{account['memory_bound']:.2f}x", exact, "--"),
            _line("decode step", ms, 1, "ms", origin, f"{account['step_bound']:.2f}x", exact, printed["latency.llama"]),
            *_batched(rows, f"{account['throughput_bound']:.2f}x", exact, printed["throughput.generic"]),
        ],
        "throughput": Figure(f"{account['throughput_bound']:.2f}x", exact),
        "printed_throughput": printed["throughput.generic"],
    }


def _batched(rows: list[Row], bound: str, exact: str, printed: Figure) -> list[dict[str, Any]]:
    """Tokens per second of the batches that one memory budget holds; nothing where none was timed."""
    timed = [row for row in rows if row.get("kind") == "equal_memory"]
    arms = {label: [row for row in timed if row["label"] == label] for label in ("dense", "catekv")}
    if not all(arms.values()):
        return []
    first = {label: own[0] for label, own in arms.items()}
    rate = {
        label: 1e3 * first[label]["batch"] / median(value for row in own for value in row["ms"])
        for label, own in arms.items()
    }
    sizes, budget = [one["batch"] for one in first.values()], first["dense"]["budget_bytes"] / 1e9
    figures: list[Figure | str] = [Figure(f"{value:,.1f} tok/s", timed[0]["origin"]) for value in rate.values()]
    ratio = Figure(f"{rate['catekv'] / rate['dense']:.2f}x", timed[0]["origin"])
    where = f"batches of {sizes[0]} and {sizes[1]} in {budget:.1f} GB, {first['dense']['context']:,} tokens each"
    return [{"name": where, "cells": [*figures, ratio, Figure(bound, exact), printed]}]


def _line(
    name: str, values: Mapping[str, float], scale: float, unit: str, origin: str, bound: str, exact: str,
    printed: Figure | str,
) -> dict[str, Any]:  # fmt: skip
    cells: list[Figure | str] = [
        Figure(f"{values[label] / scale:,.1f} {unit}", origin) for label in ("dense", "catekv")
    ]
    ratio = Figure(f"{values['dense'] / values['catekv']:.2f}x", origin)
    return {"name": name, "cells": [*cells, ratio, Figure(bound, exact), printed]}
