"""Table 1 of the crossover paper: byte crossover lengths, rebuilt from dimensions, beside the printed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("byte_account",)
COLUMNS = {"all": 1, "ffn": 1, "window": 0}  # decimals as the paper prints them
K_TOKENS = 1024
NOT_PRINTED = "--"


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of live and printed cells. Raises TableMissing when the run holds no row of this table."""
    stored = [row for row in rows if row.get("kind") == "table1"]
    if not stored:
        raise TableMissing("no rows of Table 1 in this run")
    figures = paper["crossover"]["figures"]
    return {
        "r_p": f"{stored[0]['r_p']:.0%}",
        "r_kv": f"{stored[0]['r_kv']:.0%}",
        "rows": [{"model": row["model"], "cells": list(_cells(row, figures))} for row in stored],
    }


def _cells(row: Row, figures: Mapping[str, Mapping[str, str]]) -> list[Figure | str]:
    """For each column the live figure, then the printed one."""
    cells: list[Figure | str] = []
    for column, decimals in COLUMNS.items():
        printed = figures.get(f"table1.{row['key']}.{column}")
        text = f"{row[f'{column}_tokens'] / K_TOKENS:.{decimals}f}K"
        cells += [Figure(text, row["origin"]), Figure(f"{printed['printed']}K", "paper") if printed else NOT_PRINTED]
    return cells
