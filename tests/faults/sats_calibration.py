"""Seeded faults of `sats_calibration`, on recounted thresholds and windows per error budget."""

from __future__ import annotations

from ._sats import PAPER, Row, calibration_rows, changed, worse

PROFILE = PAPER
honest = calibration_rows


def sparsity_off_target(rows: list[Row]) -> None:
    """Thresholds of another layer: the sparsity is off its target"""
    changed("recount", "layer_sparsity", lambda s: [v + 0.02 for v in s])(rows)


def errors_over_budget(rows: list[Row]) -> None:
    """The error budget is exceeded in every layer"""
    changed("recount", "layer_errors", lambda e: [v * 1.1 for v in e])(rows)


def budget_says_nothing(rows: list[Row]) -> None:
    """The smallest budget costs the most perplexity"""
    worse("sats10", 2.0)(rows)


FAULTS = (sparsity_off_target, errors_over_budget, budget_says_nothing)
