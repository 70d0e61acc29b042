"""Seeded faults of `sats_finetuned`, on windows and steps with and without adapters."""

from __future__ import annotations

from ._sats import PAPER, Row, finetuned_rows, slower, worse

PROFILE = PAPER
honest = finetuned_rows


def adapter_not_loaded(rows: list[Row]) -> None:
    """The adapter is that of another model"""
    worse("sats50-lora", 0.3)(rows)


def adapter_runs_apart(rows: list[Row]) -> None:
    """The adapter is never merged: its products come on top"""
    slower("sats50-lora", 1.3)(rows)


def routed_steps_are_slow(rows: list[Row]) -> None:
    """Routed steps with an adapter run dense"""
    slower("sats50-routed50-lora", 1.3)(rows)


FAULTS = (adapter_not_loaded, adapter_runs_apart, routed_steps_are_slow)
