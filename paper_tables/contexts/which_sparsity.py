"""Which sparsity, when: the byte account of every method of the four papers on one model. Our own addition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("catekv_efficiency",)
K_TOKENS = 1024
TITLES = {"crossover": "Crossover", "sats": "CATS and SATS", "catekv": "CateKV", "spark": "SparK"}


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per method. Raises TableMissing when the run holds none."""
    stored = [row for row in rows if row.get("kind") == "method"]
    if not stored:
        raise TableMissing("no rows of the byte account of methods in this run")
    contexts = sorted(stored[0]["bounds"], key=int)
    return {
        "model": str(stored[0]["model"]),
        "contexts": [f"{int(n) / K_TOKENS:g}K" for n in contexts],
        "rows": [
            {
                "words": [
                    str(row["name"]),
                    TITLES[row["from"]],
                    str(row["reads_less_of"]),
                    "yes" if row["memory"] else "no",
                    str(row["choice"]),
                ],
                "cells": [
                    *(Figure(f"{row['bounds'][n]:.2f}x", row["origin"]) for n in contexts),
                    Figure(_k(row["crossover_tokens"]), row["origin"]),
                ],
            }
            for row in stored
        ],
    }


def _k(tokens: float | None) -> str:
    return "--" if tokens is None else f"{tokens / K_TOKENS:.1f}K"
