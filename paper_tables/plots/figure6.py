"""Figure 6 of the crossover paper: perplexity against the keep ratio of each branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from artifact.samples import Row
from paper_tables.plots import series, style
from paper_tables.render import TableMissing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIMS: tuple[str, ...] = ()
OPTIONAL = ("quality_matched_crossover", "composition_gain")
TITLE = "Perplexity against the keep ratio of each branch"


def draw(rows: Sequence[Row], results: Mapping[str, Any], figure: Figure) -> str:
    """Return the text alternative. Without rows of quality_matched_crossover those of composition_gain are drawn."""
    own = [row for row in rows if row.get("kind") == "window"]
    candidates = ([row for row in own if row["claim"] == claim] for claim in OPTIONAL)
    used: list[Row] = next((candidate for candidate in candidates if candidate), [])
    found = series.perplexities(used)
    branches = {
        "projection": {r_p: one for (r_p, r_kv, _), one in found.items() if r_p < 1 and r_kv == 1},
        "kv": {r_kv: one for (r_p, r_kv, method), one in found.items() if r_p == 1 and method == "snapkv"},
    }
    dense = found.get((1.0, 1.0, "full"))
    if dense is None or not any(branches.values()):
        raise TableMissing("no window was scored densely and under a branch in this run")
    (panel,) = style.axes(figure)
    told = [f"dense {dense.point:.2f}"]
    panel.axhspan(dense.low, dense.high, color="0.9", zorder=0)
    panel.axhline(dense.point, color="0.35", linewidth=0.9, label=f"dense {dense.point:.2f}")
    for branch, per in branches.items():
        if not per:
            continue
        keeps = sorted(per, reverse=True)
        style.series(panel, style.LOOKS[branch], [100 * keep for keep in keeps], [per[keep] for keep in keeps])
        points = ", ".join(f"{per[keep].point:.2f} at {keep:.0%}" for keep in keeps)
        told.append(f"{style.LOOKS[branch].label} {points}")
    panel.invert_xaxis()
    panel.set(xlabel="keep ratio (%)", ylabel="perplexity (decode positions)")
    windows, tokens = dense.n, len(used[0]["nll"])
    panel.set_title(
        f"{windows} windows, {tokens} scored tokens each, {style.k(used[0].get('context', 0)):.3g}K context"
    )
    panel.legend()
    style.footnote(figure, series.origin_text(used, results))
    return f"Perplexity over {windows} windows: {'; '.join(told)}."
