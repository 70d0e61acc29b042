"""Table 3 of the crossover paper: perplexity increase and retrieval of every branch, live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifact.measure import quality
from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("retrieval_admissibility",)
K_TOKENS = 1024


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per configuration. Raises TableMissing when the run holds no answers or no scored windows."""
    answers = [row for row in rows if row.get("kind") == "answer" and not row["tuning"] and row["turn"] == 1]
    windows = [row for row in rows if row.get("kind") == "window"]
    if not answers or not windows:
        raise TableMissing("no answers or no scored windows in this run")
    losses = quality.losses(windows)
    lengths = sorted({row["asked_tokens"] for row in answers})
    asked = {row["label"] for row in answers}
    labels = [label for label in dict.fromkeys(row["label"] for row in windows) if label in asked]
    figures = paper["crossover"]["figures"]
    origin = windows[0]["origin"]
    return {
        "text": str(windows[0]["text"]),
        "context": _k(windows[0]["context"]),
        "windows": str(len(losses[labels[0]])),
        "scored": str(windows[0]["scored"]),
        "dense": Figure(f"{quality.perplexity(losses, 'dense').point:.2f}", origin),
        "paper_dense": Figure(figures["ppl.dense.32k"]["printed"], "paper"),
        "lengths": [_k(length) for length in lengths],
        "rows": [{"label": label, "cells": _cells(label, answers, losses, lengths, origin)} for label in labels],
        "paper": {
            "window": Figure(figures["retrieval.window"]["printed"], "paper"),
            "placements": Figure(figures["retrieval.placements"]["printed"], "paper"),
        },
    }


def _cells(label: str, answers: list[Row], losses: quality.Losses, lengths: list[int], origin: Any) -> list[Figure]:
    change = quality.increase(losses, label)
    base = quality.perplexity(losses, "dense").point
    text = f"{change.point * base:+.2f} [{change.low * base:+.2f}, {change.high * base:+.2f}]"
    cells = [Figure(text, origin)]
    for test in ("passkey", "multikey"):
        for length in lengths:
            own = [row for row in answers if (row["label"], row["test"], row["asked_tokens"]) == (label, test, length)]
            right = sum(row["outcome"] == "right" for row in own)
            cells.append(Figure(f"{right}/{len(own)}" if own else "--", origin))
    wrong_code = sum(row["outcome"] == "distractor" for row in answers if row["label"] == label)
    return [*cells, Figure(str(wrong_code), origin)]


def _k(tokens: int) -> str:
    return f"{tokens / K_TOKENS:g}K"
