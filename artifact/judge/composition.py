"""Choosing the fastest configuration within a perplexity budget, and what composing gains over the best single branch
(crossover, section 5.3, Table 4).

Choices are made from a timing screen; gains are taken from later blocks, never from the screen that chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artifact.judge.levels import with_levels
from artifact.measure.configuration import from_record

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Pick:
    """Within one budget: the fastest configuration, the fastest single branch and the fastest composition, by label.

    `composed` and `single` are None where the budget admits none.
    """

    budget: float
    fastest: str
    single: str | None
    composed: str | None


def label(row: Row) -> str:
    """The configuration's label of a timing row (method "none" there means the full cache)."""
    method = "full" if row["method"] == "none" else row["method"]
    return from_record({"r_p": row["r_p"], "r_kv": row["r_kv"], "method": method}).label


def relative_times(rows: Sequence[Row]) -> dict[str, float]:
    """Step time over that of the dense member of the same group, per label, of one process.

    Rows come in groups that were alive together; each group has its own dense member, so that drift between groups
    cancels. ValueError when a group has none or its members have different numbers of steps.
    """
    found: dict[str, list[float]] = {}
    for group in _groups(with_levels([dict(row) for row in rows])):
        dense = next((row for row in group if label(row) == "dense"), None)
        if dense is None:
            raise ValueError("a timing group has no dense member to compare with")
        for row in group:
            found.setdefault(label(row), []).append(row["level_ms"] / dense["level_ms"])
    return {name: sum(ratios) / len(ratios) for name, ratios in found.items()}


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(int(row["group"]), []).append(row)
    return list(groups.values())


def choose(increases: Mapping[str, float], times: Mapping[str, float], kinds: Mapping[str, str], budget: float) -> Pick:
    """Pick within a budget of perplexity increase (a share of dense perplexity), by screened times.

    ValueError when a configuration has a perplexity but no time, or the other way round.
    """
    if set(increases) != set(times):
        raise ValueError(f"{sorted(set(increases) ^ set(times))} have only one of perplexity and time")
    admitted = sorted((name for name in increases if increases[name] <= budget), key=lambda name: times[name])

    def first(kind: str) -> str | None:
        return next((name for name in admitted if kinds[name] == kind), None)

    return Pick(budget, admitted[0], first("single"), first("composed"))


def to_retime(picks: Sequence[Pick]) -> list[str]:
    """Labels to time again: every picked single branch and composition once, dense first."""
    names = [name for pick in picks for name in (pick.single, pick.composed) if name is not None]
    return ["dense", *dict.fromkeys(names)]


def gains(picks: Sequence[Pick], blocks: Sequence[Mapping[str, float]]) -> dict[float, list[float]]:
    """Per budget that admits a composition, per block: the best single branch's time over the composition's.

    Where no single branch is admitted, dense decoding is what the composition is compared with.
    """
    return {
        pick.budget: [block[pick.single or "dense"] / block[pick.composed] for block in blocks]
        for pick in picks
        if pick.composed is not None
    }
