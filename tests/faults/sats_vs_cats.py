"""Seeded faults of `sats_vs_cats`, on windows under both methods."""

from __future__ import annotations

from ._sats import PAPER, Row, changed, versus_rows, worse

PROFILE = PAPER
honest = versus_rows


def ratio_ignored(rows: list[Row]) -> None:
    """CATS ignores its ratio and skips less than SATS"""
    changed("window", "counted_sparsity", lambda s: s - 0.1, "cats50")(rows)


def sats_is_worse(rows: list[Row]) -> None:
    """The threshold of SATS falls on the wrong activation"""
    worse("sats50", 0.2)(rows)


def sats_is_worse_at_30(rows: list[Row]) -> None:
    """The same at 30%"""
    worse("sats30", 0.2)(rows)


def answers_are_lost(rows: list[Row]) -> None:
    """Choices of SATS are scored behind another question's text: it answers a quarter of them less"""
    for row in rows:
        if row.get("kind") == "choice" and row["label"] == "sats50" and row["document"] % 4 == 0:
            row["right"] = 0.0


def half_precision_is_cut_off(rows: list[Row]) -> None:
    """Weights become bfloat16 by cutting bits off: every arm loses two percent of perplexity"""
    for row in rows:
        if row.get("kind") == "format" and row["dtype"] == "bfloat16":
            row["nll"] = [value + 0.02 for value in row["nll"]]


FAULTS = (ratio_ignored, sats_is_worse, sats_is_worse_at_30, answers_are_lost, half_precision_is_cut_off)
