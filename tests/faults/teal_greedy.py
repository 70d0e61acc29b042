"""Seeded faults of `teal_greedy`, on made-up likelihoods of eight windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from artifact.profiles import Profile
from claims import teal_greedy as claim

PROFILE = Profile("paper", "m", "cuda", "float16", None, 2)

Row = dict[str, Any]


def honest() -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for window in range(8):
        level = 2.7 + 0.2 * rng.standard_normal()
        for keep in claim.KEEPS:
            for kind in ("uniform", "greedy"):
                cost = 0.5 * (1 - keep) ** 2 * (0.7 if kind == "greedy" else 1.0) + 0.002 * rng.standard_normal()
                rows.append({
                    "kind": "window", "label": f"{kind}{100 * keep:g}", "r_p": keep, "window": window, "protocol": "p",
                    "window_tokens_hash": f"w{window}", "nll": [level + cost] * 3, "counted_r_p": keep - 0.005,
                })  # fmt: skip
    return rows


def greedy_reads_more(rows: list[Row]) -> None:
    """The greedy arm ignores its ratio and reads more than the uniform one."""
    for row in rows:
        if row["label"].startswith("greedy"):
            row["counted_r_p"] += 0.04


def greedy_is_worse(rows: list[Row]) -> None:
    """Greedy thresholds of another layer: the same bytes cost more perplexity."""
    for row in rows:
        if row["label"] == "greedy50":
            row["nll"] = [value + 0.1 for value in row["nll"]]


def unequal_arms(rows: list[Row]) -> None:
    """One window is lost from one arm."""
    rows.pop()


UNEQUAL = unequal_arms
FAULTS = (greedy_reads_more, greedy_is_worse, unequal_arms)
