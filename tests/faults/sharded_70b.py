"""Seeded faults of `sharded_70b`, on step times and bytes of two ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from artifact.account import Mode, Setting, kv_bytes, step_bytes
from artifact.profiles import Profile
from artifact.shapes import known_shape
from claims import sharded_70b as claim

PROFILE = Profile("gpu", "llama-3.1-70b", "cuda", "float16", None, 2)

Row = dict[str, Any]
SHAPE = known_shape(claim.MODEL)
CONTEXT = SHAPE.window - claim.ROOM_TOKENS
BYTES_PER_MS = 8e9  # of two GPUs together


def honest() -> list[Row]:
    rows: list[Row] = []
    for block in range(claim.BLOCKS):
        for mode in (Mode.PROJECTION, Mode.DENSE, Mode.KV):
            setting = Setting(r_p=claim.R_P, r_kv=claim.R_KV)
            read = step_bytes(SHAPE, setting, CONTEXT, mode)
            cached = kv_bytes(SHAPE, setting, CONTEXT) * (claim.R_KV if mode is Mode.KV else 1.0)
            for rank in range(claim.RANKS):
                ms = read / BYTES_PER_MS * (1 + 0.001 * block) + 0.5
                rows.append(
                    {
                        "kind": "rank",
                        "cell": f"block-{block}",
                        "block": block,
                        "mode": mode.value,
                        "rank": rank,
                        "ranks": claim.RANKS,
                        "context": CONTEXT,
                        "ms": [ms] * 10,
                        "projection_bytes": (read - cached) / claim.RANKS,
                        "kv_bytes": cached / claim.RANKS,
                        "head_bytes": 0.0,
                        "shape": dataclasses.asdict(SHAPE),
                    }
                )
    return rows


def of(rows: list[Row], mode: Mode) -> list[Row]:
    return [row for row in rows if row["mode"] == mode.value]


def projection_ran_dense(rows: list[Row]) -> None:
    """The projection mode silently reads every weight, as its times and counts say."""
    for sparse, dense in zip(of(rows, Mode.PROJECTION), of(rows, Mode.DENSE), strict=True):
        sparse |= {"ms": dense["ms"], "projection_bytes": dense["projection_bytes"]}


def selection_ignored_its_ratio(rows: list[Row]) -> None:
    """KV selection reads the whole cache, which makes the projection branch look faster than it is."""
    for kept, dense in zip(of(rows, Mode.KV), of(rows, Mode.DENSE), strict=True):
        kept |= {"ms": dense["ms"], "kv_bytes": dense["kv_bytes"]}


def ranks_were_not_split(rows: list[Row]) -> None:
    """Every rank reads the whole model."""
    for row in rows:
        row["projection_bytes"] *= claim.RANKS


def half_the_selection(rows: list[Row]) -> None:
    """A rank's clock stops before the other rank has ended: KV selection seems to take half of its time."""
    for row in of(rows, Mode.KV):
        row["ms"] = [value / 2 for value in row["ms"]]


def unequal_arms(rows: list[Row]) -> None:
    """One rank of one block is lost."""
    rows[:] = [row for row in rows if not (row["block"] == 3 and row["mode"] == "kv" and row["rank"] == 1)]


UNEQUAL = unequal_arms
FAULTS = (
    projection_ran_dense,
    selection_ignored_its_ratio,
    ranks_were_not_split,
    half_the_selection,
    unequal_arms,
)
