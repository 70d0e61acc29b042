"""The measuring task behind the gate and the request mix: all four modes at representative lengths, interleaved step by
step, and the one-time selection at each of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from artifact.engine.prepare import Prepared, grid
from artifact.kv.snapkv import SnapKV
from artifact.measure.cells import live, measure_group, member, prepared_for, request, settled
from artifact.profiles import Profile
from kernels.bandwidth import read_bandwidth

Row = dict[str, Any]
TASK = "artifact.measure.gate_cells:measure"
REPEATS = 4  # timed selections per length; one more comes first, which compiles and touches memory
STEP, SELECTION = "step", "selection"


def gate_request(
    profile: Profile, ratios: tuple[float, float], contexts: Sequence[int], steps: int, longest: int, note: str = ""
) -> Row:
    """Parameters of one `measure` task: ratios (r_p, r_kv); longest: the prefill to share with other cells of a run.

    The members of one length are alive together. Together with those of all lengths they would be checked against the
    reference only once, but need the memory of all caches.
    """
    groups = [group_at(n, *ratios) for n in contexts]
    return request(profile, groups, steps, longest, note) | {"contexts": list(contexts), "ratios": list(ratios)}


def group_at(context: int, r_p: float, r_kv: float) -> list[Row]:
    """The members of one length: dense, each branch and both, projections taking turns with dense weights."""
    return [member(context, *mode) for mode in ((1.0, 1.0), (r_p, 1.0), (1.0, r_kv), (r_p, r_kv))]


def measure(params: Row) -> Iterator[Row]:
    """Task: per length one row of kind `selection` and four of kind `step` (as `measure.cells` has them)."""
    prepared = yield from live(lambda say: prepared_for(params, say))
    device = prepared.weights.device
    rows: list[Row] = []
    r_kv, steps, seed = float(params["ratios"][1]), int(params["steps"]), int(params["order_seed"])
    for number, group in enumerate(params["groups"]):
        lengths = ", ".join(f"{n:,}" for n in sorted({one["context"] for one in group}))
        yield {"progress": number / len(params["groups"]), "doing": f"decoding at {lengths} tokens"}
        rows += [row | {"kind": STEP, "group": number} for row in measure_group(prepared, group, steps, seed)]
    for context in params["contexts"]:
        once_ms = selection_ms(prepared, context, r_kv, steps)
        yield {"kind": SELECTION, "context": context, "r_kv": r_kv, "once_ms": once_ms, "text": prepared.text}
    bandwidth = read_bandwidth(device)
    for row in rows:
        bandwidth = settled(row, bandwidth, device)
        yield {**row, "read_gbps": bandwidth.median_gbps, "note": params["note"]}


def selection_ms(prepared: Prepared, context: int, r_kv: float, reserve: int) -> list[float]:
    """Ms of scoring and gathering a prompt of `context` tokens, REPEATS times."""
    cache = prepared.cache.share(context)
    queries = prepared.queries[grid(context)]
    cuda = prepared.weights.device.type == "cuda"
    times = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter_ns()
        SnapKV().select(cache, queries, r_kv, prepared.scale(), reserve)
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - begin) / 1e6)
    return times[1:]
