"""The measuring task of the selection's one-time cost: scoring and gather of a prefilled prompt, and the steps that pay
for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from artifact.cells import live, measure_group, member, prepared_for
from artifact.kv.snapkv import SnapKV
from artifact.prepare import grid

REPEATS = 5  # the first compiles or touches memory; the others are kept
Row = dict[str, Any]


def select(params: Row) -> Iterator[Row]:
    """Task: per context, ms of the one-time selection (raw repeats) and ms of dense and KV steps, interleaved."""
    prepared = yield from live(lambda say: prepared_for(params, say))
    device = prepared.weights.device
    contexts, keep, steps = params["contexts"], float(params["r_kv"]), int(params["steps"])
    for number, context in enumerate(contexts):
        yield {"progress": number / len(contexts), "doing": f"selecting at {context:,} tokens"}
        cache = prepared.cache.share(context) if prepared.synthetic else prepared.cache.fork(context, context)
        queries = prepared.queries[grid(context)]
        once_ms = []
        for _ in range(REPEATS):
            begin = _clock(device)
            SnapKV().select(cache, queries, keep, prepared.scale(), steps)
            once_ms.append((_clock(device) - begin) / 1e6)
        rows = measure_group(prepared, [member(context), member(context, 1.0, keep)], steps)
        yield {
            "kind": "selection",
            "context": context,
            "r_kv": keep,
            "once_ms": once_ms[1:],
            "first_ms": once_ms[0],
            "dense_ms": rows[0]["ms"],
            "kv_ms": rows[1]["ms"],
            "counted_r_kv": rows[1]["counted_r_kv"],
            "gate_error": max(row["gate_error"] for row in rows),
            "text": prepared.text,
        }


def _clock(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()
