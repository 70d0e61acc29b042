"""Rows of the SATS claims as the paper describes them, made up, and ways to alter them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from artifact.profiles import Profile
from claims import token_routing

Row = dict[str, Any]
PAPER = Profile("paper", "m", "cuda", "float16", None, 2)
WINDOWS = 6


def window_rows(costs: dict[str, float], **columns: Any) -> list[Row]:
    """Windows of 0.05 nats spread, every arm a constant above dense."""
    rng = np.random.default_rng(1)
    levels = 2.5 + 0.2 * rng.standard_normal(WINDOWS)
    rows = []
    for label, cost in costs.items():
        noise = 0.002 * rng.standard_normal(WINDOWS)
        method, _, rest = label.partition("-")
        target = float(rest[5:] if rest[5:].isdigit() else rest.split("-")[0][6:]) / 100 if "r" in rest[:2] else 1.0
        for window in range(WINDOWS):
            rows.append({
                "kind": "window", "label": label, "window": window, "protocol": "p", "window_tokens_hash": f"w{window}",
                "nll": [levels[window] + cost + noise[window]] * 4, "share": target,
                "counted_sparsity": 0.0 if label == "dense" else 0.5,
                "masked_share": target if method != "dense" else 0.0, "budget": None, "text": "a text",
                "held_out_share": target + 0.01 if "routed" in label else None,
                "scored": 4, "origin": "live", **columns,
            })  # fmt: skip
    return rows


def timing_rows(times: dict[str, tuple[float, Row]], blocks: int = 5, model: str = "tiny") -> list[Row]:
    rows = []
    for block in range(blocks):
        for label, (ms, arm) in times.items():
            rows.append({
                "kind": "timing", "label": label, "block": block, "model": model, "dtype": "float32", "context": 256,
                "ms": [ms * (1 + 0.003 * block)] * 8, "step_bytes": 1e6 * ms, "share": 1.0, "adapter": "",
                "fused": True, "text": "a text", "origin": "live", **arm,
            })  # fmt: skip
    return rows


def calibration_rows() -> list[Row]:
    rows: list[Row] = []
    for target, budget in ((0.3, 0.11), (0.5, 0.25)):
        rows.append({
            "kind": "recount", "target": target, "budget": budget, "layer_sparsity": [target - 0.2, target + 0.202],
            "layer_errors": [budget * 0.99, budget * 0.9], "held_out_sparsity": [target] * 2,
            "held_out_errors": [budget * 1.05] * 2,
        })  # fmt: skip
    for label, budget, cost in (("dense", None, 0.0), ("sats10", 0.05, 0.02), ("sats30", 0.1, 0.05),
                                ("sats50", 0.2, 0.2), ("sats70", 0.4, 0.9)):  # fmt: skip
        rows += window_rows({label: cost}, budget=budget)
    return rows


def choice_rows(costs: Mapping[str, float]) -> list[Row]:
    """Answers to two tasks of 100 questions: an arm that costs more answers fewer of them."""
    return [
        {
            "kind": "choice",
            "label": label,
            "task": task,
            "document": i,
            "right": float(i < 80 - 100 * cost),
            "origin": "live",
        }
        for label, cost in costs.items()
        for task in ("arc_easy", "piqa")
        for i in range(100)
    ]


def versus_rows() -> list[Row]:
    costs = {"dense": 0.0, "cats30": 0.05, "sats30": 0.051, "cats50": 0.3, "sats50": 0.25, "sats-inner50": 0.2}
    rows = choice_rows(costs) + window_rows(costs, dtype=PAPER.dtype)
    for dtype, more in (("float32", 0.0), ("bfloat16", 0.003)):
        compared = {label: costs[label] + more for label in ("dense", "cats50", "sats50")}
        rows += window_rows(compared, kind="format", dtype=dtype, cell=f"format-{dtype}")
    return rows


def routing_rows() -> list[Row]:
    base, costs = "sats50", {"dense": 0.0, "sats50": 0.4}
    for share, routed, random in ((25, 0.05, 0.09), (50, 0.12, 0.2), (75, 0.25, 0.31)):
        costs[f"{base}-routed{share}"] = routed
        for seed in token_routing.seeds(share / 100):
            costs[f"{base}-random{share}-{seed}"] = random
    rows = window_rows(costs)
    sats, routed_arm = {"method": "sats"}, {"method": "sats", "share": 0.5}
    times = {"dense": (10.0, {"method": "dense"}), "cats50": (8.1, {"method": "cats"})}
    return rows + timing_rows(times | {"sats50": (8.0, sats), "sats50-routed50": (9.0, routed_arm)})


def finetuned_rows() -> list[Row]:
    costs = {"dense": 0.0, "cats50": 0.3, "sats50": 0.4, "cats50-lora": 0.2, "sats50-lora": 0.25}
    rows = choice_rows(costs) + window_rows(costs)
    for label in ("cats50", "sats50"):
        rows.append({"kind": "adapter", "label": label, "steps_done": 9, "tokens_seen": 4608, "made_before": False})
    lora = {"method": "sats", "adapter": "one"}
    times = {"dense": (10.0, {"method": "dense"}), "sats50": (8.0, {"method": "sats"}), "sats50-lora": (8.4, lora)}
    times |= {"sats50-lora apart": (9.2, lora | {"fused": False}), "sats50-routed50-lora": (9.3, lora | {"share": 0.5})}
    return rows + timing_rows(times)


def worse(label: str, nats: float) -> Callable[[list[Row]], None]:
    def fault(rows: list[Row]) -> None:
        for row in rows:
            if row.get("kind") == "window" and row["label"] == label:
                row["nll"] = [value + nats for value in row["nll"]]

    return fault


def slower(label: str, factor: float) -> Callable[[list[Row]], None]:
    def fault(rows: list[Row]) -> None:
        for row in rows:
            if row.get("kind") == "timing" and row["label"] == label:
                row["ms"] = [value * factor for value in row["ms"]]

    return fault


def changed(kind: str, name: str, change: Callable[[Any], Any], label: str = "") -> Callable[[list[Row]], None]:
    def fault(rows: list[Row]) -> None:
        for row in rows:
            if row.get("kind") == kind and label in row.get("label", ""):
                row[name] = change(row[name])

    return fault
