"""Seeded faults of `precision`, on made-up step times of quantised weights and of a fixed budget."""

from __future__ import annotations

import dataclasses
from typing import Any

from artifact.account import kv_token_bytes
from artifact.judge.precision import Variant
from artifact.profiles import Profile
from artifact.shapes import known_shape
from claims.precision import R_KV, R_P, VARIANTS

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
SHAPE = known_shape("smollm2-135m")
GBPS = 20.0
BITS = {"int8": 8.05, "int4": 4.5, "budget": 32.0}
CROSSING = {"int8": (1024, 2304), "int4": (512, 1280), "budget": (4096, 7424)}

Row = dict[str, Any]


def step_ms(variant: Variant, mode: str, context: int) -> float:
    """Byte time at 20 GB/s with a float32 cache."""
    weights = SHAPE.layers * SHAPE.projection_params * BITS[variant.name] / 8 * (R_P if mode == "projection" else 1.0)
    kept = variant.r_kv(context, R_KV) if mode == "kv" else 1.0
    return (weights + kv_token_bytes(SHAPE, 32) * kept * context) / GBPS / 1e6


def honest() -> list[Row]:
    """Four blocks of every variant: dense and both branches at the sweep's ends, the branches around the crossing."""
    rows = []
    for block in range(4):
        for variant, ends in VARIANTS:
            places = [(n, mode, "sweep") for n in ends for mode in ("dense", "projection", "kv")]
            places += [(n, mode, "crossing") for n in CROSSING[variant.name] for mode in ("projection", "kv")]
            for context, mode, part in places:
                ms = step_ms(variant, mode, context) * (1 + 0.001 * block)
                rows.append({
                    "cell": f"block-{block}", "block": block, "kind": "precision", "group": variant.name,
                    "variant": dataclasses.asdict(variant), "part": part, "mode": mode, "context": context,
                    "ms": [ms] * 8, "weight_bits": BITS[variant.name], "loaded_weight_bits": 32, "kv_bits": 32,
                    "shape": dataclasses.asdict(SHAPE),
                })  # fmt: skip
    return rows


def codes_are_expanded(rows: list[Row]) -> None:
    """Every step reads weights that were expanded to float32 before."""
    for row in rows:
        if row["group"] != "budget":
            variant = Variant("budget", bits=None)  # float32 weights, r_kv as asked
            row["ms"] = [step_ms(variant, row["mode"], row["context"])] * 8


def sparse_reads_all_codes(rows: list[Row]) -> None:
    """The thresholded product of 8-bit weights reads every row, so that the branches never cross."""
    for row in rows:
        if row["group"] == "int8" and row["mode"] == "projection":
            row["ms"] = [step_ms(VARIANTS[0][0], "dense", row["context"])] * 8


def four_bits_never_cross(rows: list[Row]) -> None:
    """Unpacking 4-bit codes costs the thresholded product more than it saves."""
    for row in rows:
        if row["group"] == "int4" and row["mode"] == "projection":
            row["ms"] = [ms + 30 for ms in row["ms"]]


def unequal_arms(rows: list[Row]) -> None:
    """One step of one mode is lost."""
    rows[0]["ms"] = rows[0]["ms"][:-1]


UNEQUAL = unequal_arms
FAULTS = (codes_are_expanded, sparse_reads_all_codes, four_bits_never_cross, unequal_arms)
