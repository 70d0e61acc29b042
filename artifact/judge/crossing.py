"""Locating and predicting the context at which two branches take equal time (crossover, section 4.3 and appendix D).

Measured: the root of a line through the gaps T_P - T_KV at contexts around it; every T is the level of a row, fitted
over the rounds of its group (`artifact.judge.levels`). Predicted: the byte account plus the kernel cost of each branch,
taken from sweep rows at other contexts,

    s      = (1 - r_kv) dT_dense/dn                      growth of the byte-time gap, ms per token
    c_P    = mean over the sweep of  T_P  - T_dense + s n*        (time beyond the byte saving)
    c_KV   = mean over the sweep of  T_KV - T_dense + s n
    n_lat  = n* - (c_P - c_KV) / s

so the slope comes from dense decoding alone and no row of a crossing enters its prediction. All times in ms, lengths
in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]


@dataclass(frozen=True)
class Prediction:
    """Cost-aware prediction of one block: s (ms per token), costs (ms) and the predicted crossing n_lat (tokens)."""

    slope_ms: float
    cost_p_ms: float
    cost_kv_ms: float
    tokens: float


def pick(rows: Sequence[Row], r_p: float, r_kv: float) -> dict[int, float]:
    """Return the level in ms by context of the rows with these requested keep ratios."""
    return {int(row["context"]): row["level_ms"] for row in rows if row["r_p"] == r_p and row["r_kv"] == r_kv}


def gap(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
    """Return per common context the time of a minus that of b, ms."""
    return {context: a[context] - b[context] for context in sorted(a.keys() & b.keys())}


def predict(sweep: Sequence[Row], r_p: float, r_kv: float, n_star: float) -> Prediction:
    """Predict the crossing of one block from its sweep rows. Raises ValueError when fewer than two contexts were
    swept.
    """
    dense = pick(sweep, 1.0, 1.0)
    contexts = sorted(dense)
    if len(contexts) < 2:
        raise ValueError(f"the sweep holds dense rows at {contexts}; two contexts are needed for the slope")
    slope, _ = np.polyfit(contexts, [dense[n] for n in contexts], 1)
    s = float(slope) * (1.0 - r_kv)
    over_p = gap(pick(sweep, r_p, 1.0), dense)
    over_kv = gap(pick(sweep, 1.0, r_kv), dense)
    cost_p = float(np.mean([over + s * n_star for over in over_p.values()]))
    cost_kv = float(np.mean([over + s * n for n, over in over_kv.items()]))
    return Prediction(s, cost_p, cost_kv, n_star - (cost_p - cost_kv) / s if s > 0 else math.nan)


def locate(rows: Sequence[Row], r_p: float, r_kv: float) -> float:
    """Return the measured crossing of one block in tokens; NaN when the contexts do not bracket it.

    The gap must change from negative (projection faster) to positive; the root is that of the least-squares line, so
    that the noise of one context does not decide.
    """
    gaps = gap(pick(rows, r_p, 1.0), pick(rows, 1.0, r_kv))
    if len(gaps) < 2:
        return math.nan
    contexts, values = np.array(list(gaps)), np.array(list(gaps.values()))
    slope, intercept = np.polyfit(contexts, values, 1)
    if slope <= 0:
        return math.nan
    root = -intercept / slope
    margin = (contexts[-1] - contexts[0]) / (2 * (len(contexts) - 1))
    return float(root) if contexts[0] - margin <= root <= contexts[-1] + margin else math.nan


def around(predicted: float, spread: Sequence[float], step: int, low: int, high: int) -> list[int]:
    """Return contexts (multiples of `step` within [low, high]) around a predicted crossing, at least two of them."""
    wanted = {int(min(max(round(predicted * share / step) * step, low), high)) for share in spread}
    if len(wanted) < 2:
        edge = next(iter(wanted))
        wanted |= {max(low, edge - 2 * step), min(high, edge + 2 * step)}
    return sorted(wanted)
