"""Verdicts on crossings from stored rows: one estimate per block, an interval over blocks, a region from the model's
own n*.

Pure: reads rows, measures nothing. Each block is one process; its estimate compares the
crossing with the prediction of the same block, so that a machine that is slow for a minute is slow for both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from artifact.account import Mode, Setting, bound, n_star
from artifact.claim import Finding, Predicate, find, left_out, not_run
from artifact.crossing import Prediction, locate, pick, predict
from artifact.levels import with_levels
from artifact.profiles import Profile
from artifact.shapes import Shape
from artifact.stats import Interval, Region, block_interval

Row = dict[str, Any]
LEFT_OUT = "left out of a quick run"
MODES = {"projection": Mode.PROJECTION, "kv": Mode.KV, "both": Mode.BOTH}


class Judgement:
    """The rows of one run, ordered by block, with the dimensions and precisions that they carry."""

    def __init__(self, rows: Sequence[Row], profile: Profile) -> None:
        self.profile = profile
        leveled = with_levels([row for row in rows if row.get("part") in ("sweep", "crossing")])
        self.sweeps = _by_block(leveled, "sweep")
        self.crossings = _by_block(leveled, "crossing")
        self.blocks = sorted(self.sweeps.keys() & self.crossings.keys())

    def swept(self, pair: tuple[float, float]) -> bool:
        """Whether the run set out to measure this pair: a quick run leaves all but the first out."""
        modes = {(row["r_p"], row["r_kv"]) for rows in self.sweeps.values() for row in rows}
        return {(pair[0], 1.0), (1.0, pair[1])} <= modes

    def setting(self, r_p: float, r_kv: float) -> Setting:
        row = self._first()
        return Setting(r_p, r_kv, weight_bits=row["weight_bits"], kv_bits=row["kv_bits"])

    def n_star(self, r_p: float, r_kv: float) -> float:
        return n_star(self.shape(), self.setting(r_p, r_kv))

    def shape(self) -> Shape:
        return Shape(**self._first()["shape"])

    def predictions(self, r_p: float, r_kv: float) -> list[Prediction]:
        star = self.n_star(r_p, r_kv)
        return [predict(self.sweeps[block], r_p, r_kv, star) for block in self.blocks]

    def measured(self, r_p: float, r_kv: float) -> list[float]:
        return [locate(self.crossings[block], r_p, r_kv) for block in self.blocks]

    def crossing(self, predicate: Predicate, r_p: float, r_kv: float, share: float) -> Finding:
        """Measured minus predicted crossing against a region of +- `share` of n*, with the milliseconds that region
        means.
        """
        if not self.blocks:
            return not_run(predicate, "no block holds both sweep and crossing rows")
        if not self.swept((r_p, r_kv)):
            return left_out(predicate, LEFT_OUT)
        star, predictions, measured = self.n_star(r_p, r_kv), self.predictions(r_p, r_kv), self.measured(r_p, r_kv)
        width = share * star
        region = Region(-width, width, predicate.region.reason, "tokens")
        differences = [found - expected.tokens for found, expected in zip(measured, predictions, strict=True)]
        slope = float(np.mean([p.slope_ms for p in predictions]))
        bounds = block_interval(measured, unit="tokens")
        extra: dict[str, float | str] = {
            "r_p": r_p,
            "r_kv": r_kv,
            "n_star_tokens": star,
            "predicted_tokens": float(np.mean([p.tokens for p in predictions])),
            "measured_tokens": bounds.point,
            "measured_low_tokens": bounds.low,
            "measured_high_tokens": bounds.high,
            "region_ms": width * slope,
            "cost_p_ms": float(np.mean([p.cost_p_ms for p in predictions])),
            "cost_kv_ms": float(np.mean([p.cost_kv_ms for p in predictions])),
            "slope_ms_per_k": 1024 * slope,
        }
        lost = sum(not math.isfinite(value) for value in measured)
        notes = [f"{lost} of {len(measured)} blocks did not bracket the crossing"] if lost else []
        outside = self._outside(float(np.mean([p.tokens for p in predictions]))) if lost == len(measured) else ""
        note = "; ".join([*notes, *filter(None, [outside, self._first().get("note")])])
        interval = block_interval(differences, unit="tokens")
        return find(replace(predicate, region=region), interval, self.profile, note, extra)

    def _outside(self, predicted: float) -> str:
        """Say that a crossing is predicted where no context was swept: past the model's window, or under the costs."""
        contexts = [int(row["context"]) for rows in self.sweeps.values() for row in rows]
        if predicted > max(contexts):
            window = self.shape().window
            return (
                f"it is predicted at {predicted:,.0f} tokens, past {max(contexts):,} (the model's window: {window:,})"
            )
        if predicted < min(contexts):
            return f"it is predicted at {predicted:,.0f} tokens, below the shortest context of {min(contexts):,}"
        return ""

    def order(self, predicate: Predicate, pairs: Sequence[tuple[float, float]]) -> Finding:
        """Smallest distance between neighbours, in the order of their byte crossovers."""
        if not self.blocks:
            return not_run(predicate, "no block holds both sweep and crossing rows")
        if not all(self.swept(pair) for pair in pairs):
            return left_out(predicate, LEFT_OUT)
        ordered = sorted(pairs, key=lambda pair: self.n_star(*pair))
        located = [self.measured(*pair) for pair in ordered]
        gaps = [min(b - a for a, b in itertools.pairwise(one)) for one in zip(*located, strict=True)]
        return find(predicate, block_interval(gaps, unit="tokens"), self.profile)

    def ratio_at_end(self, predicate: Predicate, pair: tuple[float, float], longest: bool) -> Finding:
        """The trailing branch's step time over the leading one's at the shortest or longest swept context."""
        if not self.sweeps:
            return not_run(predicate, "no sweep was measured")
        r_p, r_kv = pair
        ratios = []
        for block in sorted(self.sweeps):
            p, kv = pick(self.sweeps[block], r_p, 1.0), pick(self.sweeps[block], 1.0, r_kv)
            context = (max if longest else min)(p.keys() & kv.keys())
            upper, lower = (p, kv) if longest else (kv, p)
            ratios.append(upper[context] / lower[context])
        return find(predicate, block_interval(ratios, unit="x"), self.profile, extra={"context_tokens": float(context)})

    def within_bound(self, predicate: Predicate, mode: str) -> Finding:
        """Gain over dense divided by the byte bound of the counted keep ratios, at the context where it is largest."""
        found: dict[tuple[int, float, float], list[float]] = {}
        reached: dict[tuple[int, float, float], float] = {}
        for block in sorted(self.sweeps):
            for row in (row for row in self.sweeps[block] if row["mode"] == mode):
                key = (int(row["context"]), row["r_p"], row["r_kv"])
                gain, limit = self.gain_and_bound(block, row)
                found.setdefault(key, []).append(gain / limit)
                reached[key] = _gbps(row) / row["read_gbps"]
        if not found:
            return not_run(predicate, f"no {mode} row was swept")
        intervals = {key: block_interval(values, unit="x") for key, values in found.items()}
        worst = max(intervals, key=lambda key: _upper(intervals[key]))
        context, r_p, r_kv = worst
        extra = {"context_tokens": context, "r_p": r_p, "r_kv": r_kv, "share_of_read_bandwidth": reached[worst]}
        return find(predicate, intervals[worst], self.profile, extra=extra)

    def gain_and_bound(self, block: int, row: Row) -> tuple[float, float]:
        """Gain over dense of a sweep row, and its byte bound at the counted keep ratios."""
        dense = pick(self.sweeps[block], 1.0, 1.0)[int(row["context"])]
        gain = dense / row["level_ms"]
        counted = self.setting(min(row["counted_r_p"], 1.0), min(row["counted_r_kv"], 1.0))
        return gain, bound(self.shape(), counted, row["context"], MODES[row["mode"]])

    def _first(self) -> Row:
        return next(iter(self.sweeps.values()))[0]


def _by_block(rows: Sequence[Row], part: str) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.get("part") == part:
            found.setdefault(int(row["block"]), []).append(row)
    return found


def _gbps(row: Row) -> float:
    """Bytes that the step read over its time, GB/s."""
    return float((row["projection_bytes"] + row["kv_bytes"] + row["head_bytes"]) / row["level_ms"] / 1e6)


def _upper(interval: Interval) -> float:
    return interval.high if interval.finite else math.inf
