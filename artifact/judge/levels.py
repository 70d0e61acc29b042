"""Step time of each member of a group, freed from what all members shared: the state of the machine at each turn.

Members of a group take turns, one step each per round, in a random order. In logarithms

    y[i] = a[m(i)] + x[i] + spikes        turn i belongs to member m(i)
    x[i] = rho x[i-1] + e[i]

a member's level plus the state of the machine, which outlasts a turn or two. rho and the levels are fitted by turns:
generalised least squares on y[i] - rho y[i-1], with Huber weights on the innovations. Rows recorded before turns were
kept get the coarser model, one factor per round. Pure: reads stored rows.

Memory of a shared machine slows down and speeds up by a tenth from step to step (rho 0.6 to 0.8) and by a quarter
within seconds. Over the seven blocks of one run, the crossing's distance from its prediction varied by 310, 230 and
340 tokens (three pairs) with every member's median, by 220, 260 and 220 with a factor per round, and by 80, 180 and 110
with this model; K_HUBER changes it little between 0.5 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Floats = NDArray[np.float64]
K_HUBER = 0.7  # residuals beyond this many scales weigh less
SWEEPS = 20


def levels_ms(samples: Floats, turns: NDArray[np.int64] | None = None) -> Floats:
    """Return the level (members,) of samples (members, rounds), all in ms and positive.

    turns (members, rounds): when each sample was taken, counted over all members of the group; neighbours in it are
    taken to share the state of the machine. None: members of a round are.
    """
    logs = np.log(samples)
    level = _over_rounds(logs)
    if turns is not None and samples.shape[1] > 1:
        level = _over_turns(logs, turns, level)
    return np.asarray(np.exp(level), dtype=np.float64)


def _over_rounds(logs: Floats) -> Floats:
    """Two-way fit a[m] + b[k] with Huber weights, b shifted so that the median round has factor 1."""
    level = np.median(logs, axis=1)
    factor = np.zeros(logs.shape[1])
    weights = np.ones_like(logs)
    for sweep in range(SWEEPS):
        rest = logs - level[:, None]
        factor = np.median(rest, axis=0) if sweep == 0 else (weights * rest).sum(0) / weights.sum(0)
        factor = factor - np.median(factor)
        rest = logs - factor
        level = np.median(rest, axis=1) if sweep == 0 else (weights * rest).sum(1) / weights.sum(1)
        weights = _huber(rest - level[:, None])
    return np.asarray(level, dtype=np.float64)


def _over_turns(logs: Floats, turns: NDArray[np.int64], level: Floats) -> Floats:
    """Levels under a state that follows x[i] = rho x[i-1] + e[i], from pairs of samples in neighbouring turns."""
    order = np.argsort(turns, axis=None)
    member = order // logs.shape[1]
    y, at = logs.ravel()[order], turns.ravel()[order]
    paired = np.flatnonzero(np.diff(at) == 1)  # a turn whose predecessor is not among the rows starts anew
    before, after = member[paired], member[paired + 1]
    if len(set(after)) < len(level):
        return level
    weights, pairs = np.ones(len(paired)), np.arange(len(paired))
    for _ in range(SWEEPS):
        state = y - level[member]
        state -= np.median(state)
        x0, x1 = state[paired], state[paired + 1]
        power = float((weights * x0 * x0).sum())
        # Below 1, or levels would not be determined: differences alone know no mean.
        rho = min(0.95, max(0.0, float((weights * x0 * x1).sum()) / power)) if power > 0 else 0.0
        design = np.zeros((len(paired), len(level)))
        design[pairs, after] += 1.0
        design[pairs, before] -= rho
        wanted = y[paired + 1] - rho * y[paired]
        weighted = design * weights[:, None]
        level = np.asarray(np.linalg.solve(weighted.T @ design, weighted.T @ wanted), dtype=np.float64)
        weights = _huber(wanted - design @ level)
    return level


def _huber(rest: Floats) -> Floats:
    distance = np.abs(rest)
    scale = max(1.4826 * float(np.median(distance)), 1e-12)
    return np.asarray(1.0 / np.maximum(1.0, distance / (K_HUBER * scale)))


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
        known = all("turns" in rows[place] for place in places)
        turns = np.array([rows[place]["turns"] for place in places], dtype=np.int64) if known else None
        for place, level in zip(places, levels_ms(samples, turns), strict=True):
            found[place]["level_ms"] = float(level)
    return found
