"""Needle heat map: placements answered by CateKV and by dense decoding, per prompt length and quarter of its depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_tables.render import Figure, Latex, Row, TableMissing

CLAIMS = ("catekv_accuracy",)
QUARTERS = 4
DARKEST = 55  # percent of black behind a cell that answers nothing


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per test and length, one column per quarter. Raises TableMissing without answers."""
    answers = [row for row in rows if row.get("kind") == "answer" and row["test"] in ("passkey", "multikey")]
    if not answers:
        raise TableMissing("no needle was asked for in this run")
    keys = sorted({(row["test"], row["prompt_tokens"]) for row in answers})
    return {
        "text": str(answers[0]["text"]),
        "quarters": [f"{100 * q // QUARTERS}-{100 * (q + 1) // QUARTERS}%" for q in range(QUARTERS)],
        "rows": [
            {
                "test": test,
                "tokens": Figure(f"{tokens:,}", answers[0]["origin"]),
                "cells": [_cell(_at(answers, test, tokens, quarter)) for quarter in range(QUARTERS)],
            }
            for test, tokens in keys
        ],
    }


def _at(answers: list[Row], test: str, tokens: int, quarter: int) -> list[Row]:
    return [
        row
        for row in answers
        if (row["test"], row["prompt_tokens"]) == (test, tokens)
        and min(QUARTERS - 1, int(row["depth"] * QUARTERS)) == quarter
    ]


def _cell(rows: list[Row]) -> dict[str, Any]:
    """Shade and counts; the shade is that of CateKV."""
    own, dense = ([row for row in rows if row["label"] == label] for label in ("catekv", "dense"))
    if not own:
        return {"shade": Latex("white"), "text": "--"}
    right, base = (sum(row["score"] == 1 for row in arm) for arm in (own, dense))
    shade = round(DARKEST * (1 - right / len(own)))
    return {"shade": Latex(f"black!{shade}"), "text": Figure(f"{right} ({base}) of {len(own)}", own[0]["origin"])}
