"""The measuring task behind the gate and the request mix: all four modes at representative lengths, interleaved step by
step, and the one-time selection at each of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from artifact.account import Mode
from artifact.cells import check_bandwidth, live, measure_group, member, prepared_for, request
from artifact.crossing import quiet_ms
from artifact.gate_costs import SELECTING, Costs, costs_from
from artifact.kv.snapkv import SnapKV
from artifact.prepare import Prepared, grid
from artifact.profiles import Profile
from kernels.bandwidth import read_bandwidth

Row = dict[str, Any]
TASK = "artifact.gate_cells:measure"
REPEATS = 4  # timed selections per length; one more comes first, which compiles and touches memory
STEP, SELECTION = "step", "selection"


def gate_request(
    profile: Profile, ratios: tuple[float, float], contexts: Sequence[int], steps: int, longest: int, note: str = ""
) -> Row:
    """Parameters of one `measure` task: ratios (r_p, r_kv); longest: the prefill to share with other cells of a run."""
    groups = [group_at(n, *ratios) for n in contexts]
    return request(profile, groups, steps, longest, note) | {"contexts": list(contexts), "ratios": list(ratios)}


def group_at(context: int, r_p: float, r_kv: float) -> list[Row]:
    """The members of one length: dense, each branch and both, projections taking turns with dense weights."""
    return [member(context, *mode) for mode in ((1.0, 1.0), (r_p, 1.0), (1.0, r_kv), (r_p, r_kv))]


def measure(params: Row) -> Iterator[Row]:
    """Task: per length four rows of kind `step` (as `artifact.cells` measures them) and one of kind `selection`."""
    prepared = yield from live(lambda say: prepared_for(params, say))
    device = prepared.weights.device
    before = read_bandwidth(device)
    rows: list[Row] = []
    r_kv, steps = float(params["ratios"][1]), int(params["steps"])
    for number, (context, group) in enumerate(zip(params["contexts"], params["groups"], strict=True)):
        yield {"progress": number / len(params["groups"]), "doing": f"decoding and selecting at {context:,} tokens"}
        rows += [row | {"kind": STEP} for row in measure_group(prepared, group, steps)]
        once_ms = selection_ms(prepared, context, r_kv, steps)
        yield {"kind": SELECTION, "context": context, "r_kv": r_kv, "once_ms": once_ms, "text": prepared.text}
    bandwidth = before.best(read_bandwidth(device))
    for row in rows:
        check_bandwidth(row, bandwidth)
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


def quiet_times(rows: Sequence[Row]) -> tuple[list[int], dict[Mode, list[float]], list[tuple[int, float]]]:
    """Contexts, quiet step ms per mode and context, and (context, ms) of the selection, from the rows of one process.

    Raises ValueError when a context lacks a mode, arms hold different numbers of steps or no selection was timed.
    """
    import numpy as np

    stepped = [row for row in rows if row.get("kind") == STEP]
    contexts = sorted({int(row["context"]) for row in stepped})
    found: dict[Mode, dict[int, float]] = {mode: {} for mode in Mode}
    for row in stepped:
        found[Mode(row["mode"])][int(row["context"])] = quiet_ms(np.asarray(row["ms"]))
    if any(sorted(times) != contexts for times in found.values()) or not contexts:
        raise ValueError(f"modes were not all timed at {contexts} tokens")
    if len({len(row["ms"]) for row in stepped}) != 1:
        raise ValueError("the arms hold different numbers of steps")
    once = [(int(row["context"]), quiet_ms(np.asarray(row["once_ms"]))) for row in rows if row.get("kind") == SELECTION]
    if not once:
        raise ValueError("no selection was timed")
    return contexts, {mode: [times[n] for n in contexts] for mode, times in found.items()}, sorted(once)


def costs_of(rows: Sequence[Row]) -> Costs:
    """Costs from the rows of one process."""
    contexts, step_ms, once = quiet_times(rows)
    selecting = next(row for row in rows if row.get("kind") == STEP and Mode(row["mode"]) in SELECTING)
    return costs_from(contexts, step_ms, once, float(selecting["r_kv"]))
