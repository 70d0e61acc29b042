"""Figure 5 of the crossover paper: what one KV window gains over dense decoding by three attention paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from artifact.judge.baselines import gains_by_block
from artifact.samples import Row
from artifact.stats import block_interval
from paper_tables.plots import series, style
from paper_tables.render import TableMissing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLAIMS = ("baseline_sensitivity",)
OPTIONAL: tuple[str, ...] = ()
TITLE = "Gain of the same KV window over three dense baselines"


def draw(rows: Sequence[Row], results: Mapping[str, Any], figure: Figure) -> str:
    """Return the text alternative."""
    timed = [row for row in rows if "ms" in row]
    gains, limits = gains_by_block(timed, tuple(style.PATH_LOOKS))
    if not gains:
        raise TableMissing("no block of baseline_sensitivity was measured in this run")
    intervals = {path: block_interval([gain[path] for gain in gains], unit="x") for path in style.PATH_LOOKS}
    (panel,) = style.axes(figure)
    for place, (path, look) in enumerate(style.PATH_LOOKS.items()):
        points, lengths = style.bars([intervals[path]])
        panel.bar([place], points, yerr=lengths, color=look.color, hatch=look.hatch, edgecolor="black", capsize=3)
        panel.annotate(
            f"{points[0]:.2f}x", (place, points[0] + lengths[1][0]), (0, 3), textcoords="offset points", ha="center"
        )
    limit = float(np.median(limits))
    panel.axhline(limit, color="black", linestyle="--", linewidth=1.0, label=f"byte bound {limit:.2f}x")
    panel.axhline(1.0, color="0.35", linewidth=0.8)
    panel.set_xticks(range(len(style.PATH_LOOKS)), [look.label for look in style.PATH_LOOKS.values()])
    sparse = next(row for row in timed if row["mode"] == "kv")
    panel.set(xlabel="attention path of the dense baseline", ylabel="gain of the window (x)")
    panel.set_title(f"{sparse['r_kv']:.0%} window at {style.k(sparse['context']):.3g}K tokens")
    panel.grid(axis="x", visible=False)
    panel.margins(y=0.15)
    panel.legend(loc="upper right")
    style.footnote(figure, series.origin_text(timed, results))
    said = ", ".join(f"{intervals[path].point:.2f}x over {look.label}" for path, look in style.PATH_LOOKS.items())
    return f"The window gains {said}; its byte bound is {limit:.2f}x."
