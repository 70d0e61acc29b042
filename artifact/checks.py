"""Checks of numbers a user gave: each raises UserError naming the quantity, the value and what to give instead."""

from __future__ import annotations

import math

from artifact.errors import UserError


def finite(what: str, value: float) -> float:
    """The value, if it is a number that is neither NaN nor infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{what} is {value}; give a finite number")
    return value


def positive(what: str, value: float) -> float:
    """The value, if it is a finite number above 0."""
    if finite(what, value) <= 0:
        raise UserError(f"{what} is {value}; give a number above 0")
    return value


def in_range(what: str, value: float, low: float, high: float) -> float:
    """The value, if it lies in (low, high]: the range of keep ratios, where nothing kept is no method."""
    if not low < finite(what, value) <= high:
        raise UserError(f"{what} is {value}; give a number above {low} and at most {high}")
    return value


def count(what: str, value: int, low: int) -> int:
    """The value, if it is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserError(f"{what} is {value}; give a whole number of at least {low}")
    return value
