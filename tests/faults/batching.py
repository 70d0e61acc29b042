"""Seeded faults of `batching`, on made-up unions and batched step times."""

from __future__ import annotations

import dataclasses
from typing import Any

from artifact.account import Setting, kv_token_bytes, projection_bytes
from artifact.profiles import Profile
from artifact.shapes import known_shape

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
SHAPE = known_shape("smollm2-135m")
GBPS = 20.0
UNION = {1: 0.5, 2: 0.71, 4: 0.86, 8: 0.95, 16: 0.985}
CONTEXTS = {1: (1024, 7936, 4096, 8192), 2: (512, 3072, 1280, 2304), 4: (256, 1536, 256, 768)}

Row = dict[str, Any]


def step_ms(batch: int, context: int, r_p: float, r_kv: float) -> float:
    """Byte time at 20 GB/s, float32: the union of the weights and the cache of every sequence."""
    setting = Setting(weight_bits=32, kv_bits=32)
    weights = projection_bytes(SHAPE, setting) * (UNION[batch] if r_p < 1 else 1.0)
    return (weights + batch * kv_token_bytes(SHAPE, 32) * r_kv * context) / GBPS / 1e6


def honest() -> list[Row]:
    """Four blocks of unions, and of batches of one, two and four around their crossings."""
    shape = dataclasses.asdict(SHAPE)
    rows: list[Row] = []
    for block in range(4):
        for batch, share in UNION.items():
            rows.append({"cell": f"union-{block}", "block": block, "kind": "union", "batch": batch,
                         "u_b": min(1.0, share + 0.002 * block), "counted_r_p": 0.5, "shape": shape})  # fmt: skip
        for batch, (short, long, low, high) in CONTEXTS.items():
            for part, contexts, modes in (
                ("sweep", (short, long), ((1.0, 1.0), (0.5, 1.0), (1.0, 0.3))),
                ("crossing", (low, high), ((0.5, 1.0), (1.0, 0.3))),
            ):
                for context in contexts:
                    for r_p, r_kv in modes:
                        ms = step_ms(batch, context, r_p, r_kv) * (1 + 0.001 * block)
                        rows.append({
                            "cell": f"batched-{block}", "block": block, "kind": "batched", "part": part,
                            "group": batch, "batch": batch, "context": context, "r_p": r_p, "r_kv": r_kv,
                            "ms": [ms] * 8,
                            "u_b": UNION[batch] if r_p < 1 else 1.0, "counted_r_p": r_p, "shape": shape,
                            "weight_bits": 32, "kv_bits": 32,
                        })  # fmt: skip
    return rows


def one_mask_for_all(rows: list[Row]) -> None:
    """The batch reads only what its first sequence activates."""
    for row in rows:
        if row["kind"] == "union":
            row["u_b"] = 0.5 - 0.001 * row["batch"]


def sum_instead_of_union(rows: list[Row]) -> None:
    """Cache bytes of a batch are counted once, so that its crossover does not move."""
    for row in rows:
        if row["kind"] == "union" and row["batch"] > 1:
            row["u_b"] = 0.5
        if row["kind"] == "batched" and row["part"] == "crossing":
            context = row["context"] * row["batch"]
            row["ms"] = [step_ms(1, context, row["r_p"], row["r_kv"]) / row["batch"]] * 8
            row["context"] = context


def unequal_arms(rows: list[Row]) -> None:
    """One step of the KV branch is lost."""
    row = next(row for row in rows if row["kind"] == "batched" and row["r_kv"] < 1)
    row["ms"] = row["ms"][:-1]


def weights_read_for_every_sequence(rows: list[Row]) -> None:
    """The KV branch of a batch decodes its sequences one after the other: every weight is read once for each."""
    for row in rows:
        if row["kind"] == "batched" and row["r_kv"] < 1:
            row["ms"] = [row["batch"] * step_ms(1, row["context"], 1.0, row["r_kv"])] * 8


UNEQUAL = unequal_arms
FAULTS = (one_mask_for_all, sum_instead_of_union, weights_read_for_every_sequence, unequal_arms)
