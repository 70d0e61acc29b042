"""Figure 3 of the crossover paper: speedup of both branches and their composition over context, beside byte bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from artifact.samples import Row
from paper_tables.plots import series, style
from paper_tables.render import TableMissing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIMS: tuple[str, ...] = ()
OPTIONAL = ("speedup_bounds", "crossover")
TITLE = "Speedup over dense decoding against context, with byte bounds"


def draw(rows: Sequence[Row], results: Mapping[str, Any], figure: Figure) -> str:
    """Return the text alternative. Without rows of speedup_bounds the sweep rows of crossover are drawn."""
    own = series.timed([row for row in rows if row["claim"] == "speedup_bounds"])
    swept = [row for row in rows if row["claim"] == "crossover" and row.get("part") == "sweep"]
    used = own or series.timed(swept)
    pair = series.nominal_pair(used)
    gains = series.gains(used, pair)
    if not gains:
        raise TableMissing("no timed rows of speedup_bounds or crossover in this run")
    (panel,) = style.axes(figure)
    contexts = sorted({n for per in gains.values() for n in per})
    grid = [contexts[0] * (contexts[-1] / contexts[0]) ** (i / 48) for i in range(49)]
    told = []
    for mode, per in gains.items():
        look = style.LOOKS[mode]
        style.series(panel, look, [style.k(n) for n in per], list(per.values()))
        style.bound_line(panel, look, [style.k(n) for n in grid], series.bounds(used, mode, pair, grid))
        limits = series.bounds(used, mode, pair, [float(n) for n in per])
        points = ", ".join(
            f"{one.point:.2f}x of at most {limit:.2f}x at {style.k(n):.3g}K"
            for (n, one), limit in zip(per.items(), limits, strict=True)
        )
        told.append(f"{look.label}: {points}.")
    panel.plot([], [], color="0.35", dashes=(4, 2), linewidth=1.0, label="byte bound (dashed)")
    panel.axhline(1.0, color="0.35", linewidth=0.8)
    if contexts[-1] > 2 * contexts[0]:
        panel.set_xscale("log", base=2)
        panel.set_xticks([style.k(n) for n in contexts], [f"{style.k(n):.3g}" for n in contexts])
        panel.minorticks_off()
    panel.set(xlabel="context (K tokens)", ylabel="speedup over dense (x)")
    panel.set_title(f"{pair[0]:.0%} projection keep, {pair[1]:.0%} KV keep")
    style.legend_above(figure, panel)
    style.footnote(figure, series.origin_text(used, results))
    return " ".join(told)
