"""Crossings of quantised weights and of a fixed KV budget, predicted and measured, from stored rows (crossover, section
3.3). Pure.

    n* = P (1 - r_P) s_w / (2 kv_heads head_dim (1 - r_KV) s_kv)        weights of s_w, cache elements of s_kv bytes
    n* = b + P (1 - r_P) s_w / (2 kv_heads head_dim s_kv)               a budget of b tokens, above b

Under a budget the skipped entries are n - b: with lengths counted from b and a keep ratio of 0, the prediction and the
location of a crossing are those of `artifact.judge.crossing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from artifact.account import Mode, Setting, n_star
from artifact.judge.crossing import locate, predict
from artifact.shapes import Shape

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """What is changed: bits of the projection weights (None: as loaded) or a KV budget in tokens (None: r_kv)."""

    name: str
    bits: int | None = None
    budget_tokens: int | None = None

    def r_kv(self, context: int, keep: float) -> float:
        """The keep ratio of the KV branch at a context: r_KV = b / n under a budget."""
        return keep if self.budget_tokens is None else min(1.0, self.budget_tokens / context)

    def n_star(self, row: Row, r_p: float, keep: float) -> float:
        """The byte crossover at the precisions that a row carries."""
        bits = {"weight_bits": float(row["weight_bits"]), "kv_bits": float(row["kv_bits"])}
        if self.budget_tokens is None:
            setting = Setting(r_p, keep, bits["weight_bits"], bits["kv_bits"])
        else:
            setting = Setting(r_p, 1.0, bits["weight_bits"], bits["kv_bits"], budget_tokens=self.budget_tokens)
        return n_star(Shape(**row["shape"]), setting)


@dataclass(frozen=True)
class Crossing:
    """n*, the cost-aware prediction and the measured crossing of one block, tokens."""

    star: float
    predicted: float
    measured: float


def crossing(rows: Sequence[Row], variant: Variant, r_p: float, keep: float) -> Crossing:
    """Predict from the sweep rows and locate among the crossing rows of one block; rows carry `level_ms`."""
    star = variant.n_star(rows[0], r_p, keep)
    shift = variant.budget_tokens or 0
    ratio = keep if variant.budget_tokens is None else 0.0
    moved = [_moved(row, r_p, ratio, shift) for row in rows]
    sweep = [row for row in moved if row["part"] == "sweep"]
    predicted = predict(sweep, r_p, ratio, star - shift).tokens + shift
    measured = locate([row for row in moved if row["part"] == "crossing"], r_p, ratio) + shift
    return Crossing(star, predicted, measured)


def _moved(row: Row, r_p: float, ratio: float, shift: int) -> Row:
    mode = Mode(row["mode"])
    own = (r_p if mode is Mode.PROJECTION else 1.0, ratio if mode is Mode.KV else 1.0)
    return {**row, "context": row["context"] - shift, "r_p": own[0], "r_kv": own[1]}
