"""Timed steps of gate-mask arms by what they ran on: every model in every format of its weights is judged apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def by_setting(timed: Iterable[Row]) -> dict[str, list[list[Row]]]:
    """The rows of every block of every setting, by the setting's name: `Llama-3.1-8B, float32`."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in sorted(timed, key=lambda row: (row["model"], row["dtype"], row["block"])):
        found.setdefault(f"{row['model']}, {row['dtype']}", {}).setdefault(row["block"], []).append(row)
    return {name: list(blocks.values()) for name, blocks in found.items()}


def no_room(rows: Iterable[Row]) -> dict[str, float | str]:
    """Settings that were left out, by name, with the reason."""
    return {
        f"not timed, {row['model']}, {row['dtype']}": str(row["reason"]) for row in rows if row.get("kind") == "no-room"
    }
