"""Step time of each member of a group, freed from what all members shared: the state of the machine at each turn.

Members of a group take turns, one step each per round, in a random order. In logarithms

    y[i] = a[m(i)] + b[k(i)] + x[i] + spikes      turn i belongs to member m(i) and round k(i)
    x[i] = rho x[i-1] + e[i]

a member's level, the round's factor, and a state that outlasts a turn or two. rho, levels and factors are fitted by
turns: generalised least squares on y[i] - rho y[i-1], with Huber weights on the innovations. Rows recorded before turns
were kept get the model without x. Pure: reads stored rows.

Memory of a shared machine slows down and speeds up by a tenth from step to step (rho 0.6 to 0.8) and by a quarter
within seconds. Between the fourteen blocks of two runs, the distance of a crossing from its prediction varied by (root
mean square over three pairs) 193 tokens with a factor per round, by 150 with the state and by 127 with both; with every
member's median by about 260. K_HUBER changes it little between 0.4 and 1.
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
FEWEST_FOR_FACTORS = 3
RIDGE = 1e-9  # only keeps a round without paired turns determined


def levels_ms(samples: Floats, turns: NDArray[np.int64] | None = None) -> Floats:
    """Return the level (members,) of samples (members, rounds), all in ms and positive, in a round of median factor.

    turns (members, rounds): when each sample was taken, counted over all members of the group, in rising order; None
    where it was not recorded.
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
    members, rounds = logs.shape
    order = np.argsort(turns, axis=None)
    member, place = order // rounds, order % rounds
    y, at = logs.ravel()[order], turns.ravel()[order]
    paired = np.flatnonzero(np.diff(at) == 1)  # a turn whose predecessor is not among the rows starts anew
    if len(set(member[paired + 1])) < members:
        return level
    # A column per member and, where rounds have members enough to tell them from the state, per round but the first.
    factors = rounds - 1 if members >= FEWEST_FOR_FACTORS else 0
    columns = np.zeros((len(y), members + factors))
    columns[np.arange(len(y)), member] = 1.0
    later = np.flatnonzero((place > 0) & (factors > 0))
    columns[later, members + place[later] - 1] = 1.0
    fit = np.concatenate([level, np.zeros(factors)])
    weights, penalised = np.ones(len(paired)), np.arange(members, members + factors)
    for _ in range(SWEEPS):
        state = y - columns @ fit
        state -= np.median(state)
        x0, x1 = state[paired], state[paired + 1]
        power = float((weights * x0 * x0).sum())
        # Below 1, or levels would not be determined: differences alone know no mean.
        rho = min(0.95, max(0.0, float((weights * x0 * x1).sum()) / power)) if power > 0 else 0.0
        design = columns[paired + 1] - rho * columns[paired]
        wanted = y[paired + 1] - rho * y[paired]
        weighted = design * weights[:, None]
        normal = weighted.T @ design
        normal[penalised, penalised] += RIDGE * np.trace(normal)
        fit = np.asarray(np.linalg.solve(normal, weighted.T @ wanted), dtype=np.float64)
        weights = _huber(wanted - design @ fit)
    return fit[:members] + float(np.median(np.append(0.0, fit[members:])))


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
