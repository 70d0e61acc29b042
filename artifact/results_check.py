"""The shape of results.json, checked where it is read: it may have been edited by hand or written by a stranger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from artifact.stats import Verdict

MOST = 1e300  # of any number: what lies beyond overflows as soon as anything is done with it
VERDICTS = frozenset(verdict.value for verdict in Verdict)
Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -MOST <= value <= MOST


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _verdict(value: Any) -> bool:
    return isinstance(value, str) and value in VERDICTS


def _extra(value: Any) -> bool:
    """Figures beside a verdict: numbers, texts, null for what is not finite."""
    return isinstance(value, dict) and all(isinstance(one, str) or _number_or_none(one) for one in value.values())


def _fields(**checks: Check) -> Check:
    """An object that holds these fields, each as it must be; others do no harm."""

    def check(value: Any) -> bool:
        return isinstance(value, dict) and all(name in value and one(value[name]) for name, one in checks.items())

    return check


_region = _fields(low=_number_or_none, high=_number_or_none, reason=_text, unit=_text)
_measured = _fields(
    point=_number_or_none, low=_number_or_none, high=_number_or_none, n=_count, method=_text, unit=_text
)


def _interval(value: Any) -> bool:
    return value is None or _measured(value)


_finding = _fields(
    predicate=_text, statement=_text, place=_text, paper_value=_text, region=_region, interval=_interval,
    verdict=_verdict, note=_text, extra=_extra,
)  # fmt: skip


def _findings(value: Any) -> bool:
    return isinstance(value, list) and all(_finding(one) for one in value)


_claim = _fields(
    verdict=_verdict, reason=_text, usage=lambda value: isinstance(value, bool), minutes=_number, peak_bytes=_count,
    cells=_count, findings=_findings,
)  # fmt: skip


def fault(results: Mapping[str, Any]) -> str:
    """What is wrong with a results record, in a few words; empty when nothing is."""
    if not isinstance(results.get("claims"), dict):
        return "lists no claims"
    for name in ("profile", "model"):
        if not _text(results.get(name)):
            return f"does not name its {name}"
    if not isinstance(results.get("quick"), bool):
        return "does not say whether it was a quick run"
    damaged = next((name for name, claim in results["claims"].items() if not _claim(claim)), None)
    return "" if damaged is None else f"holds a damaged entry for {damaged[:60]!r}"
