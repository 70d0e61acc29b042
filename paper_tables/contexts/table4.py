"""Table 4 of the crossover paper: the fastest configuration within each perplexity budget.

Timed on synthetic weights, its perplexities are the paper's and stand as the budget that admits a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifact.judge import composition
from artifact.measure import quality
from claims.composition_gain import DENSE_PPL, PAPER_BUDGETS, picked, scored
from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("composition_gain",)
NONE = "--"


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per budget. Raises TableMissing when the run has no perplexities, screen or blocks."""
    windows, published = scored(rows), [row for row in rows if row.get("kind") == "admitted"]
    timed = [row for row in rows if str(row["cell"]).startswith("block-")]
    blocks = sorted({row["block"] for row in timed})
    if not (windows or published) or not blocks:
        raise TableMissing("no scored windows or no timed blocks in this run")
    losses = quality.losses(windows)
    picks = picked(rows)
    times = [composition.relative_times([row for row in rows if row["cell"] == f"block-{b}"]) for b in blocks]
    figures = paper["crossover"]["figures"]
    return {
        "blocks": str(len(blocks)),
        "windows": str(len(losses["dense"])) if windows else "",
        "settings": str(len(losses) or len(published)),
        "text": str(timed[0]["text"] if published else windows[0]["text"]),
        "rows": [_row(pick, losses, times, timed[0]["origin"]) for pick in picks],
        "paper_low": Figure(f"{figures['composition.a100.low']['printed']}%", "paper"),
        "paper_high": Figure(f"{figures['composition.a6000.high']['printed']}%", "paper"),
    }


def _row(pick: composition.Pick, losses: quality.Losses, times: list[dict[str, float]], origin: Any) -> dict[str, Any]:
    cells: list[Figure | str] = [Figure(f"{pick.budget:.1%}", origin)]
    for name in (pick.single, pick.composed):
        if name is None:
            cells += [NONE, NONE, NONE]
            continue
        speedup = sum(1 / block[name] for block in times) / len(times)
        cells += [
            Figure(name, origin),
            _change(losses, name, pick.budget, origin),
            Figure(f"{speedup:.2f}x", origin),
        ]
    gains = composition.gains([pick], times).get(pick.budget)
    if gains:
        cells += [Figure(f"{sum(gains) / len(gains) - 1:+.1%}", origin), Figure(f"{min(gains) - 1:+.1%}", origin)]
    else:
        cells += [NONE, NONE]
    return {"cells": cells, "of_paper": pick.budget in PAPER_BUDGETS}


def _change(losses: quality.Losses, name: str, budget: float, origin: Any) -> Figure:
    """Increase of perplexity with its interval; on synthetic weights the paper's budget that admits the setting."""
    if not losses:
        return Figure(f"within {budget * DENSE_PPL:.1f} PPL", "paper")
    change = quality.increase(losses, name)
    return Figure(f"{change.point:+.1%} [{change.low:+.1%}, {change.high:+.1%}]", origin)
