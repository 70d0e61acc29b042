"""Verdicts on crossings from stored rows: one estimate per block, an interval over blocks, a region from the model's
own n*.

Pure: reads rows, measures nothing. Each block is one process; its estimate compares the
crossing with the prediction of the same block, so that a machine that is slow for a minute is slow for both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from artifact.account import Mode, Setting, bound, n_star
from artifact.claim import Finding, Predicate, find, left_out, not_run
from artifact.judge.crossing import Prediction, locate, pick, predict
from artifact.judge.levels import with_levels
from artifact.profiles import Profile
from artifact.shapes import Shape
from artifact.stats import Interval, Region, block_interval, bootstrap

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
        resampled = bootstrap([[one] for one in differences], lambda drawn: float(np.median(drawn)), unit="tokens")
        extra: dict[str, float | str] = {
            "r_p": r_p,
            "r_kv": r_kv,
            "n_star_tokens": star,
            "predicted_tokens": float(np.mean([p.tokens for p in predictions])),
            "measured_tokens": bounds.point,
            "measured_low_tokens": bounds.low,
            "measured_high_tokens": bounds.high,
            # Of the difference, blocks resampled: narrower than what is judged (docs/judge-rates.md), shown beside it.
            "bootstrap_low_tokens": resampled.low,
            "bootstrap_high_tokens": resampled.high,
            "region_ms": width * slope,
            "cost_p_ms": float(np.mean([p.cost_p_ms for p in predictions])),
            "cost_kv_ms": float(np.mean([p.cost_kv_ms for p in predictions])),
            "slope_ms_per_k": 1024 * slope,
        }
        lost = sum(not math.isfinite(value) for value in measured)
        notes = [f"{lost} of {len(measured)} blocks did not bracket the crossing"] if lost else []
        outside = self._outside(float(np.mean([p.tokens for p in predictions]))) if lost == len(measured) else ""
        note = "; ".join([*notes, *filter(None, [outside, self._first().get("note")])])
        if outside and star > self._longest() + width:  # by bytes alone, too, this window holds no crossing
            return replace(left_out(predicate, note), extra=extra)
        interval = block_interval(differences, unit="tokens")
        return find(replace(predicate, region=region), interval, self.profile, note, extra)

    def _longest(self) -> int:
        return max(int(row["context"]) for rows in self.sweeps.values() for row in rows)

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
        if any(not any(map(math.isfinite, one)) for one in located):
            return left_out(predicate, "a pair has no crossing within the contexts swept")
        gaps = [min(b - a for a, b in itertools.pairwise(one)) for one in zip(*located, strict=True)]
        return find(predicate, block_interval(gaps, unit="tokens"), self.profile)

    def projection_leads_at_first(self, predicate: Predicate, pair: tuple[float, float]) -> Finding:
        """KV step time over projection step time at the shortest swept context."""
        if not self.sweeps:
            return not_run(predicate, "no sweep was measured")
        context, ratios = self._kv_over_projection(pair, min)
        return find(predicate, block_interval(ratios, unit="x"), self.profile, extra={"context_tokens": context})

    def predicted_leads_at_last(self, predicate: Predicate, pair: tuple[float, float], share: float) -> Finding:
        """Step time of the trailing branch over the leading one at the longest swept context, the leader being the one
        that the prediction names: KV selection past the crossing, projection before it. The rows that are judged
        take no part in that prediction: it knows the branches by their other contexts.
        """
        if not self.sweeps:
            return not_run(predicate, "no sweep was measured")
        context, ratios = self._kv_over_projection(pair, max)
        star = self.n_star(*pair)
        rest = [
            [row for row in rows if row["context"] != context or row["mode"] == "dense"]
            for rows in self.sweeps.values()
        ]
        predicted = float(np.mean([predict(rows, *pair, star).tokens for rows in rest]))
        if abs(context - predicted) <= share * star:
            return left_out(predicate, f"the crossing is predicted at {predicted:,.0f} tokens, where the sweep ends")
        kv_leads = context > predicted
        leading = [1 / ratio if kv_leads else ratio for ratio in ratios]
        extra: dict[str, float | str] = {
            "context_tokens": context,
            "predicted_crossing_tokens": predicted,
            "predicted_leader": "KV selection" if kv_leads else "projection",
        }
        return find(predicate, block_interval(leading, unit="x"), self.profile, extra=extra)

    def _kv_over_projection(
        self, pair: tuple[float, float], end: Callable[[Iterable[int]], int]
    ) -> tuple[int, list[float]]:
        """KV over projection step time per block, at the shortest or longest context that both were swept at."""
        ratios, context = [], 0
        for block in sorted(self.sweeps):
            p, kv = pick(self.sweeps[block], pair[0], 1.0), pick(self.sweeps[block], 1.0, pair[1])
            context = end(p.keys() & kv.keys())
            ratios.append(kv[context] / p[context])
        return context, ratios

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
