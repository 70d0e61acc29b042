"""Findings of results.json as text: the same words in every report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from artifact.report.console import interval_text, number, region_text
from artifact.stats import Interval, Region


def interval_of(finding: Mapping[str, Any]) -> Interval | None:
    """The interval of a stored finding; a null stands for a number that was not finite."""
    stored = finding["interval"]
    if stored is None:
        return None
    point = _number(stored["point"], math.nan)
    low, high = _number(stored["low"], -math.inf), _number(stored["high"], math.inf)
    if math.isnan(point):
        low = high = math.nan
    return Interval(point, low, high, int(stored["n"]), str(stored["method"]), str(stored["unit"]))


def region_of(finding: Mapping[str, Any]) -> Region:
    """The acceptance region of a stored finding."""
    stored = finding["region"]
    return Region(stored["low"], stored["high"], str(stored["reason"]), str(stored["unit"]))


def measured_text(finding: Mapping[str, Any]) -> str:
    """The measured value with its interval."""
    return interval_text(interval_of(finding))


def accepted_text(finding: Mapping[str, Any]) -> str:
    """The acceptance region as an inequality."""
    return region_text(region_of(finding))


def value_text(value: Any) -> str:
    """One entry of `extra`."""
    if value is None:
        return "not finite"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return number(float(value))


def finding_text(finding: Mapping[str, Any]) -> str:
    """A finding in one line: measured, accepted, note."""
    parts = [f"measured {measured_text(finding)}", f"accepted {accepted_text(finding)}", finding["note"]]
    return "; ".join(part for part in parts if part)


def _number(value: Any, missing: float) -> float:
    return missing if value is None else float(value)
