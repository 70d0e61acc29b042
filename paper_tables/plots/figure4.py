"""Figure 4 of the crossover paper: the gap T_P - T_KV around each crossing, with predicted and measured crossing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from artifact.judge.crossing_judge import Judgement
from artifact.profiles import Profile
from artifact.samples import Row
from paper_tables.plots import series, style
from paper_tables.render import TableMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLAIMS = ("crossover",)
OPTIONAL: tuple[str, ...] = ()
TITLE = "Paired gap of the branches around each crossing"


def draw(rows: Sequence[Row], results: Mapping[str, Any], figure: Figure) -> str:
    """Return the text alternative; one panel per keep-ratio pair that the claim located."""
    findings = results.get("claims", {}).get("crossover", {}).get("findings", [])
    located = [finding["extra"] for finding in findings if "n_star_tokens" in finding.get("extra", {})]
    # Only the rows are read: where they were measured plays no part in a figure.
    judgement = Judgement(rows, Profile(str(results.get("profile", "")), "", "cpu", "float32", None, 1))
    if not located or not judgement.blocks:
        raise TableMissing("no crossing was located in this run")
    per_block = {block: judgement.crossings[block] for block in judgement.blocks}
    told = []
    for panel, extra in zip(style.axes(figure, len(located)), located, strict=True):
        told.append(_panel(panel, extra, series.gaps(per_block, (extra["r_p"], extra["r_kv"]))))
    style.footnote(figure, series.origin_text(rows, results))
    return " ".join(told)


def _panel(panel: Axes, extra: Mapping[str, Any], gaps: Mapping[int, Any]) -> str:
    x = [style.k(n) for n in gaps]
    style.series(panel, style.LOOKS["dense"], x, list(gaps.values()), label="gap, 95% over blocks")
    panel.axhline(0.0, color="black", linewidth=0.8)
    marks = [("n_star_tokens", "n*", (1, 2), "0.5"), ("predicted_tokens", "predicted", (5, 2), "#1b3a6b")]
    said = []
    for key, name, dashes, color in marks:
        if extra.get(key) is None:
            continue
        panel.axvline(style.k(extra[key]), color=color, dashes=dashes, label=f"{name} {style.k(extra[key]):.2f}K")
        said.append(f"{name} {style.k(extra[key]):.2f}K")
    measured, low, high = (extra.get(f"measured{part}_tokens") for part in ("", "_low", "_high"))
    if measured is not None:
        label = f"measured {style.k(measured):.2f}K"
        spread = None
        if low is not None and high is not None:
            spread = [[style.k(measured - low)], [style.k(high - measured)]]
            said.append(f"{label} [{style.k(low):.2f}K, {style.k(high):.2f}K]")
        else:
            said.append(label)
        look: dict[str, Any] = {"color": "#d1495b", "marker": "*", "markersize": 9, "capsize": 3}
        panel.errorbar([style.k(measured)], [0.0], xerr=spread, label=label, **look)
    title = f"{extra['r_p']:.0%} projection / {extra['r_kv']:.0%} KV keep"
    panel.set(xlabel="context (K tokens)", ylabel="$T_{P} - T_{KV}$ (ms)", title=title)
    style.headroom(panel)
    panel.legend(loc="upper left")
    return f"{title}: {', '.join(said)}."
