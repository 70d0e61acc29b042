"""Step time of each member of a group, freed from what all members shared: the state of the machine in each round.

Members of a group take turns, one step each per round, so the k-th samples belong together. In logarithms

    ln t[m, k] = a[m] + b[k] + e[m, k]

a member's level times the round's factor times noise, of which a part only ever adds time. Both are fitted by turns
with Huber weights, and b is shifted so that the median round has factor 1. Pure: reads stored rows.

Memory of a shared machine slows down and speeds up by a quarter within seconds. On such samples the standard error
of a crossing's distance from its prediction was 460 tokens with every member's own median or lower quartile, and 200
with this fit; the width K_HUBER changes it little between 0.5 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
K_HUBER = 0.7  # residuals beyond this many scales weigh less
SWEEPS = 20


def levels_ms(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the level (members,) of samples (members, rounds), all in ms and positive."""
    logs = np.log(samples)
    level = np.median(logs, axis=1)
    factor = np.zeros(logs.shape[1])
    weights = np.ones_like(logs)
    for sweep in range(SWEEPS):
        rest = logs - level[:, None]
        factor = np.median(rest, axis=0) if sweep == 0 else (weights * rest).sum(0) / weights.sum(0)
        factor = factor - np.median(factor)
        rest = logs - factor
        level = np.median(rest, axis=1) if sweep == 0 else (weights * rest).sum(1) / weights.sum(1)
        distance = np.abs(rest - level[:, None])
        scale = max(1.4826 * float(np.median(distance)), 1e-12)
        weights = 1.0 / np.maximum(1.0, distance / (K_HUBER * scale))
    return np.asarray(np.exp(level), dtype=np.float64)


def with_levels(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with `level_ms`, each group of a cell fitted on its own.

    Raises ValueError when members of a group hold different numbers of samples, or none.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.get("cell"), row.get("block"), row.get("group", 0)), []).append(place)
    found = [dict(row) for row in rows]
    for places in groups.values():
        counts = {len(rows[place]["ms"]) for place in places}
        if len(counts) > 1 or counts == {0}:
            raise ValueError(f"members of one group hold {sorted(counts)} samples; every round has one of each")
        samples = np.array([rows[place]["ms"] for place in places], dtype=np.float64)
        for place, level in zip(places, levels_ms(samples), strict=True):
            found[place]["level_ms"] = float(level)
    return found
