"""How every figure looks: sizes, fonts, and a colour, marker and line per series that grey printing keeps apart.

Measured series are solid with markers and intervals, byte bounds dashed without markers. Nothing here uses pyplot: a
figure is an object, not a global state, and its bytes depend on its data alone.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from artifact.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

K_TOKENS = 1024
COLUMN_INCHES = 3.4
HEIGHT_INCHES = 2.7
RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same letters
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.88",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.fancybox": False,
    "axes.axisbelow": True,
    "pdf.fonttype": 42,
    "svg.hashsalt": "sparse-decoding",
    "figure.dpi": 100,
    "savefig.dpi": 200,
}
NO_DATES: dict[str, dict[str, None]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@dataclass(frozen=True)
class Look:
    """Colour, marker of measured points, dash pattern of the byte bound, hatch of bars."""

    label: str
    color: str
    marker: str
    dashes: tuple[float, ...]
    hatch: str = ""


# The colours also differ in lightness (about 30, 55, 75 of 100), and markers differ for whoever sees no colour.
LOOKS = {
    "dense": Look("dense", "0.35", "D", (4, 2), ""),
    "projection": Look("projection", "#1b3a6b", "o", (6, 2), "//"),
    "kv": Look("KV selection", "#d1495b", "s", (3, 1.5), ""),
    "both": Look("composition", "#66a182", "^", (6, 2, 1.5, 2), "xx"),
}
PATH_LOOKS = {
    "masked": Look("masked", "#d1495b", "o", (4, 2), "//"),
    "fused": Look("fused", "#edae49", "s", (4, 2), "\\\\"),
    "splitk": Look("split-K", "#66a182", "^", (4, 2), ""),
}


def axes(figure: Figure, columns: int = 1) -> list[Axes]:
    """`columns` panels side by side in a figure of one column's width each."""
    figure.set_size_inches(COLUMN_INCHES * columns, HEIGHT_INCHES)
    return list(figure.subplots(1, columns, squeeze=False)[0])


def bars(intervals: list[Interval]) -> tuple[list[float], list[list[float]]]:
    """Points and the lengths of their error bars; an unbounded interval (too few blocks) has no bar."""
    points = [one.point for one in intervals]
    lower = [one.point - one.low if one.finite else 0.0 for one in intervals]
    upper = [one.high - one.point if one.finite else 0.0 for one in intervals]
    return points, [lower, upper]


def series(panel: Axes, look: Look, x: list[float], intervals: list[Interval], label: str | None = None) -> None:
    """A measured series with its intervals."""
    points, lengths = bars(intervals)
    panel.errorbar(x, points, yerr=lengths, color=look.color, marker=look.marker, capsize=2, label=label or look.label)


def bound_line(panel: Axes, look: Look, x: list[float], y: list[float], label: str | None = None) -> None:
    """A byte bound: dashed, without markers, behind the measurement."""
    panel.plot(x, y, color=look.color, dashes=look.dashes, linewidth=1.0, zorder=1, label=label)


def legend_above(figure: Figure, panel: Axes, columns: int = 2) -> None:
    """The legend of a panel above all panels, where it hides no curve."""
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=columns)


def headroom(panel: Axes, share: float = 0.6) -> None:
    """Leave room for a legend above the data."""
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + share * (high - low))


def footnote(figure: Figure, text: str) -> None:
    """Where the rows come from, in small print under the axes."""
    columns = figure.get_size_inches()[0] / COLUMN_INCHES
    lines = textwrap.fill(text, int(76 * columns))
    figure.supxlabel(lines, fontsize=6, color="0.35", x=0.01, ha="left")


def k(tokens: float) -> float:
    """Tokens in K for an axis."""
    return tokens / K_TOKENS
