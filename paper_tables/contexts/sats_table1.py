"""Table 1 of the SATS paper: multiple-choice accuracy of CATS and SATS at matched sparsity, live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifact.judge import accuracy
from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("sats_vs_cats",)


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per arm, one column per task. Raises TableMissing when nothing was asked."""
    arms = accuracy.arms(rows)
    if not arms:
        why = next((str(row["reason"]) for row in rows if row.get("kind") == "no-choice"), "no questions in this run")
        raise TableMissing(why)
    origin = next(row["origin"] for row in rows if row.get("kind") == "choice")
    first = next(iter(arms.values()))
    tasks = list(accuracy.by_task(first))
    found = []
    for label, answers in arms.items():
        shares = [*accuracy.by_task(answers).values(), accuracy.average(answers)]
        found.append({"label": label, "cells": [Figure(f"{100 * share:.1f}", origin) for share in shares]})
    return {"rows": found, "tasks": tasks, "questions": f"{len(first):,}"}
