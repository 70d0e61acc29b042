"""Table 5 of the crossover paper: what every dispatch policy gains on the request mix, live and recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from artifact.deploy import dispatch
from artifact.stats import block_interval
from claims.dispatch import gathered
from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("dispatch",)
NONE = "--"
# Policies whose speedup the paper's text prints.
PRINTED = {"always projection": "projection", "always compose": "compose", dispatch.LATENCY_GATE: "gate"}


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per policy, one column per machine. Raises TableMissing when the run priced no mix."""
    mix, times = gathered(list(rows))
    times = [one for one in times if len(one.blocks) > 1]
    if mix is None or not times:
        raise TableMissing("no request mix was priced by two blocks in this run")
    figures = paper["crossover"]["figures"]
    columns = []
    for one in times:
        totals = dispatch.priced(one, dispatch.decodes_for(mix, one))
        origin = "recorded" if one.machine else str(rows[0]["origin"])
        columns.append((dispatch.speedups(totals), origin))
    return {
        "mix": mix.describe(),
        "machines": [one.machine or "this machine" for one in times],
        "blocks": ", ".join(str(len(one.blocks)) for one in times),
        "rows": [{"policy": policy, "cells": _cells(policy, columns, figures)} for policy in dispatch.POLICIES],
    }


def _cells(
    policy: str, columns: Sequence[tuple[dict[str, list[float]], str]], figures: Mapping[str, Any]
) -> list[Figure | str]:
    cells: list[Figure | str] = []
    for speedups, origin in columns:
        interval = block_interval(speedups[policy], unit="x")
        cells.append(Figure(f"{interval.point:.2f}x [{interval.low:.2f}, {interval.high:.2f}]", origin))
    for machine in ("a100", "a6000"):
        name = PRINTED.get(policy)
        cells.append(Figure(f"{figures[f'mix.{name}.{machine}']['printed']}x", "paper") if name else NONE)
    return cells
