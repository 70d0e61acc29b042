"""Figure 1 of the crossover paper: bytes of the two removable terms over context, and where their savings meet (n*)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from artifact.account import Setting, kv_saving, kv_token_bytes, n_star, projection_bytes, projection_saving
from artifact.errors import UserError
from artifact.samples import Row
from artifact.shapes import Shape, known_shape
from paper_tables.plots import style
from paper_tables.render import TableMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLAIMS = ("byte_account",)
OPTIONAL = ("crossover",)
TITLE = "Traffic of the two removable terms over context"
PAPER_MODEL = "Llama-3.1-8B"


def draw(rows: Sequence[Row], results: Mapping[str, Any], figure: Figure) -> str:
    """Return the text alternative. Rows of Table 1 give the paper's model, timed rows that of this run."""
    stored = [row for row in rows if row.get("kind") == "table1" and row["model"] == PAPER_MODEL]
    if not stored:
        raise TableMissing(f"no row of Table 1 for {PAPER_MODEL} in this run")
    first = stored[0]
    shown = [(known_shape(first["key"]), Setting(first["r_p"], first["r_kv"]))]
    shown += _own_model(rows, first)
    panels = style.axes(figure, len(shown))
    told = [_panel(panel, *one) for panel, one in zip(panels, shown, strict=True)]
    style.legend_above(figure, panels[0], 2 * len(shown))
    style.footnote(figure, "computed from model dimensions; nothing is timed")
    return " ".join(told)


def _own_model(rows: Sequence[Row], nominal: Row) -> list[tuple[Shape, Setting]]:
    """Dimensions and precision of the model that this run timed, where that is another one than the paper's."""
    for row in rows:
        if "shape" not in row:
            continue
        try:
            shape = Shape(**row["shape"])
        except (TypeError, UserError):
            return []
        if shape.name == PAPER_MODEL:
            return []
        bits = {"weight_bits": row["weight_bits"], "kv_bits": row["kv_bits"]}
        return [(shape, Setting(nominal["r_p"], nominal["r_kv"], **bits))]
    return []


def _panel(panel: Axes, shape: Shape, setting: Setting) -> str:
    star = n_star(shape, setting)
    longest = max(1.6 * star, float(shape.window))
    contexts = [longest * i / 64 for i in range(65)]
    unit, name = (1e9, "GB") if projection_bytes(shape, setting) >= 1e9 else (1e6, "MB")
    weights = projection_bytes(shape, setting) / unit
    x = [style.k(n) for n in contexts]
    p, kv = style.LOOKS["projection"], style.LOOKS["kv"]
    panel.plot(x, [weights for _ in x], color=p.color, label="projection weights")
    panel.plot(
        x, [kv_token_bytes(shape, setting.kv_bits) * n / unit for n in contexts], color=kv.color, label="KV cache"
    )
    saved = projection_saving(shape, setting) / unit
    style.bound_line(panel, p, x, [saved for _ in x], f"saved at {setting.r_p:.0%} keep")
    style.bound_line(
        panel, kv, x, [kv_saving(shape, setting, n) / unit for n in contexts], f"saved at {setting.r_kv:.0%} keep"
    )
    panel.plot([style.k(star)], [saved], marker="*", markersize=9, color="black", linestyle="none")
    panel.annotate(f"n* = {style.k(star):.1f}K", (style.k(star), saved), (5, -10), textcoords="offset points")
    panel.set(xlabel="context (K tokens)", ylabel=f"{name} read per decode step", title=shape.name)
    panel.set_xlim(0, x[-1])
    panel.set_ylim(bottom=0)
    return (
        f"{shape.name}: projection weights are {weights:.3g} {name} per step at any context, the KV cache grows by "
        f"{1024 * kv_token_bytes(shape, setting.kv_bits) / 1e6:.3g} MB per 1K tokens; the savings at {setting.r_p:.0%} "
        f"projection keep and {setting.r_kv:.0%} KV keep are equal at n* = {style.k(star):.1f}K tokens."
    )
