"""Numbers behind the figures: intervals over blocks of gains and gaps, from stored rows. Pure; draws nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from artifact.account import Mode, Setting, bound
from artifact.judge.crossing import gap, pick
from artifact.judge.levels import with_levels
from artifact.samples import Row
from artifact.shapes import Shape
from artifact.stats import Interval, block_interval, bootstrap

MODES = {"projection": Mode.PROJECTION, "kv": Mode.KV, "both": Mode.BOTH}
NOMINAL = (0.5, 0.3)


def timed(rows: Sequence[Row]) -> list[Row]:
    """Rows of timed decode steps on the library's own attention path."""
    return [row for row in rows if "ms" in row and "mode" in row and row.get("path", "splitk") == "splitk"]


def nominal_pair(rows: Sequence[Row]) -> tuple[float, float]:
    """The keep ratios that the composed rows were asked for most often; the paper's pair where nothing was composed."""
    pairs = [(row["r_p"], row["r_kv"]) for row in rows if row["mode"] == "both"]
    return max(sorted(set(pairs)), key=pairs.count) if pairs else NOMINAL


def gains(rows: Sequence[Row], pair: tuple[float, float]) -> dict[str, dict[int, Interval]]:
    """Per mode and context the gain over dense of the same cell, over blocks.

    Raises ValueError when the arms of a cell hold different numbers of samples.
    """
    wanted = {"projection": (pair[0], 1.0), "kv": (1.0, pair[1]), "both": pair}
    found: dict[str, dict[int, list[float]]] = {mode: {} for mode in wanted}
    for cell in sorted({(row["block"], row["cell"]) for row in rows}):
        own = with_levels([row for row in rows if (row["block"], row["cell"]) == cell])
        dense = pick(own, 1.0, 1.0)
        for mode, (r_p, r_kv) in wanted.items():
            for context, ms in pick(own, r_p, r_kv).items():
                if context in dense:
                    found[mode].setdefault(context, []).append(dense[context] / ms)
    return {
        mode: {context: block_interval(values, unit="x") for context, values in sorted(per.items())}
        for mode, per in found.items()
        if per
    }


def bounds(rows: Sequence[Row], mode: str, pair: tuple[float, float], contexts: Sequence[float]) -> list[float]:
    """Byte bound of a mode at each context, at the keep ratios that its rows counted (their median)."""
    own = [
        row for row in rows if row["mode"] == mode and row["r_p"] in (pair[0], 1.0) and row["r_kv"] in (pair[1], 1.0)
    ]
    counted = {name: min(1.0, float(np.median([row[name] for row in own]))) for name in ("counted_r_p", "counted_r_kv")}
    first = own[0]
    setting = Setting(
        counted["counted_r_p"], counted["counted_r_kv"], weight_bits=first["weight_bits"], kv_bits=first["kv_bits"]
    )
    return [bound(Shape(**first["shape"]), setting, n, MODES[mode]) for n in contexts]


def gaps(per_block: Mapping[int, Sequence[Row]], pair: tuple[float, float]) -> dict[int, Interval]:
    """Per context the gap T_P - T_KV in ms, over blocks."""
    found: dict[int, list[float]] = {}
    for block in sorted(per_block):
        rows = with_levels(per_block[block])
        for context, gap_ms in gap(pick(rows, pair[0], 1.0), pick(rows, 1.0, pair[1])).items():
            found.setdefault(context, []).append(gap_ms)
    return {context: block_interval(values, unit="ms") for context, values in sorted(found.items())}


def perplexities(rows: Sequence[Row]) -> dict[tuple[float, float, str], Interval]:
    """Perplexity of every configuration (r_p, r_kv, method) over windows: exp of the mean nll, bootstrap over windows.

    Raises ValueError when the configurations did not score the same windows.
    """
    means: dict[tuple[float, float, str], dict[int, float]] = {}
    for row in rows:
        if row.get("kind") == "window" and "nll" in row:
            key = (float(row["r_p"]), float(row["r_kv"]), str(row["method"]))
            means.setdefault(key, {})[int(row["window"])] = math.fsum(row["nll"]) / len(row["nll"])
    windows = {tuple(sorted(per)) for per in means.values()}
    if len(windows) > 1:
        raise ValueError(f"configurations scored different windows: {sorted(windows)}")
    return {key: _perplexity([means[key][window] for window in sorted(means[key])]) for key in sorted(means)}


def _perplexity(window_means: list[float]) -> Interval:
    blocks = [[value] for value in window_means]
    mean = bootstrap(blocks, lambda drawn: float(np.mean(np.concatenate(drawn))))
    point, low, high = (math.exp(value) for value in (mean.point, mean.low, mean.high))
    return Interval(point, low, high, len(blocks), "bootstrap 95% over windows", "PPL")


def origin_text(rows: Sequence[Row], results: Mapping[str, Any]) -> str:
    """Where the rows come from, in one line."""
    origin = ", ".join(sorted({str(row.get("origin", "live")) for row in rows}))
    blocks = len({row["block"] for row in rows if "block" in row})
    text = next((str(row["text"]) for row in rows if row.get("text")), "")
    parts = [origin, f"model {results.get('model', 'unknown')}", f"profile {results.get('profile', 'unknown')}"]
    parts += [f"{blocks} block{'s' if blocks != 1 else ''}"] if any("ms" in row for row in rows) else []
    parts += ["quick run"] if results.get("quick") else []
    return "; ".join(parts + ([f"text {text}"] if text else []))
