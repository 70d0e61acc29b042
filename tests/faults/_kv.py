"""Rows of the CateKV and SparK claims as the papers describe them, made up."""

from __future__ import annotations

from typing import Any

import numpy as np

from artifact.judge import which_sparsity
from artifact.profiles import Profile
from artifact.shapes import known_shape
from claims import catekv_efficiency, spark_storage

Row = dict[str, Any]
EMBEDDED = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)
PAPER_PROFILE = Profile("paper", "model", "cuda", "float16", None, 2)
STORED = {"origin": "live", "text": "a text", "block": 0, "simulated": False}


def windows(costs: dict[str, float]) -> list[Row]:
    """Windows under arms that cost these nats over dense, with a little noise of each pair."""
    rng = np.random.default_rng(0)
    rows = []
    for window in range(8):
        level = 2.7 + 0.2 * rng.standard_normal()
        for label, cost in costs.items():
            nll = [level + cost + 0.003 * rng.standard_normal()] * 4
            rows.append({
                **STORED, "kind": "window", "label": label, "method": label, "window": window, "protocol": "p",
                "window_tokens_hash": f"w{window}", "nll": nll, "kept_share": 0.44,
                "simulated": label.endswith("sampled"),
            })  # fmt: skip
    return rows


CATEKV = {
    "dense": 0.0, "catekv": 0.02, "snapkv": 0.05, "pyramidkv": 0.09, "random heads": 0.2, "reversed heads": 0.4,
    "quest": 0.05, "catekv+quest": 0.06,
}  # fmt: skip
SPARK = {
    "dense": 0.0, "snapkv30": 0.04, "spark50": 0.005, "spark80": 0.03, "spark80 unrecovered": 0.3, "think50": 0.08,
    "think80": 0.9, "spark80 signless": 0.04, "spark80 sampled": 0.035, "snapkv30+spark50": 0.05,
    "snapkv30+think50": 0.2,
}  # fmt: skip


def answers() -> list[Row]:
    rows = []
    for test, count in (("passkey", 4), ("multikey", 20), ("tracking", 16)):
        for number in range(count):
            for label in ("dense", "catekv", "snapkv"):
                right = test != "multikey" or number != 7
                rows.append({
                    **STORED, "kind": "answer", "label": label, "method": label, "test": test, "kept_share": 0.44,
                    "prompt_id": f"{test}{number}", "prompt_tokens": 1024, "depth": (number + 0.5) / count,
                    "outcome": "right" if right else "wrong", "score": float(right),
                })  # fmt: skip
    return rows


def catekv_rows() -> list[Row]:
    return [*windows(CATEKV), *answers()]


def timing(gain: float = 1.3, extra_entries: int = 0) -> list[Row]:
    shape = {"layers": 30, "kv_heads": 3}
    context = 7936
    kept = catekv_efficiency.expected_entries(shape, context)
    rows = []
    for block in range(5):
        for label, entries, ms in (("dense", 90 * context, 70.0), ("catekv", kept + extra_entries, 70.0 / gain)):
            rows.append({
                **STORED, "kind": "timing", "label": label, "block": block, "context": context, "shape": shape,
                "ms": [ms + 0.01 * block + 0.02 * step for step in range(12)], "retained_entries": entries,
                "storage_bytes": 512 * (entries + (90 * 30 if label == "catekv" else 0)), "kv_bytes": 512.0 * entries,
                "projection_bytes": 4.2e8, "head_bytes": 1.1e8, "counted_r_kv": entries / (90 * context),
            })  # fmt: skip
    return rows


def batches(gain: float = 1.0) -> list[Row]:
    """Batches of three dense and seven CateKV sequences in equal memory; a step takes its byte time over `gain`."""
    rows = []
    for block in range(5):
        for label, batch, kv_bytes in (("dense", 3, 2.83e8), ("catekv", 7, 2.7e8)):
            ms = (4.2e8 + 1.1e8 + kv_bytes) / 2e7 / (gain if label == "catekv" else 1.0)
            rows.append({
                **STORED, "kind": "equal_memory", "label": label, "block": block, "batch": batch, "context": 2048,
                "ms": [ms + 0.01 * block + 0.02 * step for step in range(6)], "interleaved": True,
                "projection_bytes": 4.2e8, "head_bytes": 1.1e8, "kv_bytes": kv_bytes, "held_bytes": 10**9,
                "budget_bytes": 1.1e9, "note": "",
            })  # fmt: skip
    return rows


def efficiency_rows() -> list[Row]:
    shape = known_shape("llama-3.1-8b")
    stored = [catekv_efficiency.account_row(shape), *which_sparsity.rows(shape), {"kind": "batch_plan", "reason": ""}]
    return [*({**STORED, **row} for row in stored), *timing(), *batches()]


def storage_rows() -> list[Row]:
    stored = [{"kind": "stored", "label": "snapkv", "kept_share": 0.3}]
    stored += [{"kind": "stored", "label": f"snapkv+spark{p}", "kept_share": s} for p, s in ((50, 0.24), (80, 0.2))]
    rows = [*spark_storage.key_rows(), spark_storage.motivation_row(), *stored]
    steps = [
        {**STORED, "kind": "timing", "label": label, "block": block, "context": 4096, "ms": [ms + 0.1 * block] * 8,
         "storage_bytes": 1e8, "counted_r_kv": 0.7}
        for block in range(3)
        for label, ms in (("dense", 60.0), ("spark50", 80.0), ("spark80", 75.0), ("think50", 55.0))
    ]  # fmt: skip
    return [*({**STORED, **row} for row in rows), *steps]
