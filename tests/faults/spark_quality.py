"""Seeded faults of `spark_quality`, on windows under every arm."""

from __future__ import annotations

from ._kv import PAPER_PROFILE, SPARK, Row, windows

PROFILE = PAPER_PROFILE


def honest() -> list[Row]:
    """Windows as the paper orders the arms."""
    return windows(SPARK)


def pruning_ignored(rows: list[Row]) -> None:
    """ThinK prunes nothing: its structured masks cost as little as the unstructured ones"""
    rows[:] = windows({**SPARK, "think50": SPARK["spark50"] - 0.01, "think80": SPARK["spark80"] - 0.01})


def recovery_ignored(rows: list[Row]) -> None:
    """Recovery is switched on and does nothing"""
    rows[:] = windows({**SPARK, "spark80": SPARK["spark80 unrecovered"] + 0.05})


def unequal_arms(rows: list[Row]) -> None:
    """One window is lost from one arm"""
    rows.remove(next(row for row in rows if row["label"] == "spark80"))


UNEQUAL = unequal_arms
FAULTS = (pruning_ignored, recovery_ignored, unequal_arms)
