"""The picture of a gate table: step time of every mode over context, and the mode that the gate chooses for every
prompt and generated length. The same table gives the same bytes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifact.account import K_TOKENS, Mode
from artifact.deploy.gate import MODES, Gate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHORTEST_NEW_TOKENS = 8
CELLS = 96  # of the map, in each direction


def draw(gate: Gate, path: Path) -> None:
    """Write the picture; the format follows the name (.png or .svg)."""
    import matplotlib
    from matplotlib.figure import Figure

    from paper_tables.plots import style

    kind = path.suffix.lstrip(".")
    buffer = io.BytesIO()
    defaults: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    with matplotlib.rc_context(defaults | style.RC):
        figure = Figure(layout="constrained")
        steps, choices = style.axes(figure, 2)
        _steps(steps, gate)
        _choices(choices, gate)
        failed = sorted({check.mode.value for check in gate.table.checks if check.passed is False})
        _title(figure, gate, failed)
        style.legend_above(figure, steps, 4)
        metadata: Any = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        figure.savefig(buffer, format=kind, metadata=metadata)
    path.write_bytes(buffer.getvalue())


def _title(figure: Figure, gate: Gate, failed: list[str]) -> None:
    from paper_tables.plots import style

    table = gate.table
    refused = f"; not admitted: {', '.join(failed)}" if failed else ""
    style.footnote(
        figure,
        f"{table.model_name} on {table.device}, {table.dtype}; projection keep {table.r_p:.0%}, "
        f"KV keep {table.r_kv:.0%}{refused}",
    )


def _steps(panel: Axes, gate: Gate) -> None:
    from paper_tables.plots import style

    contexts = [style.k(n) for n in gate.table.contexts]
    for mode in MODES:
        look = style.LOOKS[mode.value]
        panel.plot(contexts, gate.table.step_ms[mode], color=look.color, marker=look.marker, label=look.label)
    panel.set_xscale("log", base=2)
    panel.set_xticks(contexts, [f"{n:.3g}" for n in contexts])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set(xlabel="context (K tokens)", ylabel="ms per decode step")


def choice_map(gate: Gate) -> tuple[list[int], list[int], list[list[Mode | None]]]:
    """Prompt lengths, generated lengths, and the chosen mode of every pair; None outside the window."""
    longest = gate.table.window_tokens
    prompts = _spaced(gate.table.contexts[0], longest - SHORTEST_NEW_TOKENS)
    generated = _spaced(SHORTEST_NEW_TOKENS, min(longest // 2, 4 * K_TOKENS))
    chosen = [[gate.choose(n, m).mode if n + m <= longest else None for n in prompts] for m in generated]
    return prompts, generated, chosen


def _spaced(low: int, high: int) -> list[int]:
    """Lengths from low to high, evenly on a logarithmic axis."""
    return sorted({round(low * (high / low) ** (i / (CELLS - 1))) for i in range(CELLS)})


def _choices(panel: Axes, gate: Gate) -> None:
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    from paper_tables.plots import style

    prompts, generated, chosen = choice_map(gate)
    index = np.array([[np.nan if mode is None else MODES.index(mode) for mode in line] for line in chosen])
    colors = ListedColormap([style.LOOKS[mode.value].color for mode in MODES])
    x = [style.k(n) for n in prompts]
    panel.grid(False)
    panel.pcolormesh(x, generated, index, cmap=colors, vmin=-0.5, vmax=len(MODES) - 0.5, shading="nearest")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    ticks = [style.k(n) for n in gate.table.contexts]
    panel.set_xticks(ticks, [f"{n:.3g}" for n in ticks])
    rows = [n for n in (8, 32, 128, 512, 2048) if n <= generated[-1]]
    panel.set_yticks(rows, [str(n) for n in rows])
    panel.minorticks_off()
    panel.set(xlabel="prompt (K tokens)", ylabel="generated tokens")
    panel.set_title("fastest admitted mode, selection included")
    used = [mode for mode in MODES if (index == MODES.index(mode)).any()]
    patches = [Patch(color=style.LOOKS[mode.value].color, label=style.LOOKS[mode.value].label) for mode in used]
    panel.legend(handles=patches, loc="lower left", framealpha=0.9)
