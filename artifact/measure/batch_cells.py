"""The measuring tasks of batched decoding: the union of active channels over different texts, and batched steps of both
branches, interleaved.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

from artifact.engine import prompts
from artifact.engine.batch import BatchDecoder, Member
from artifact.engine.batch_check import check_step
from artifact.engine.cache import KVCache
from artifact.engine.prefill import prefill
from artifact.engine.prepare import Prepared, grid
from artifact.engine.timing import interleave, release
from artifact.measure import batch_members
from artifact.measure.cells import last_level_bytes, live, mode_name, prepared_for, settled
from artifact.measure.workbench import open_workbench
from artifact.projection.thresholds import Thresholds
from kernels.bandwidth import read_bandwidth

Row = dict[str, Any]
One = tuple[int, float, float, str]  # context, r_p, r_kv, part
UNION, TIMED = "artifact.measure.batch_cells:union", "artifact.measure.batch_cells:timed"
WARMUP_STEPS = 2
ROOM_STEPS = WARMUP_STEPS + 1  # and the step that is checked
BETWEEN = (0.25, 0.75)  # where the crossing rows lie between the ends of a sweep


def union(params: Row) -> Iterator[Row]:
    """Task: u_B over real decode steps, one row per batch size.

    Every sequence has its own passage of the evaluation text, prefilled densely; `first` is the number of the passage
    that the batch starts with, so that blocks see different text.
    """
    said: list[Row] = []
    bench = open_workbench(
        params["model"], params["text"], params["device"], params["dtype"],
        lambda share, doing: said.append({"progress": share, "doing": doing}),
    )  # fmt: skip
    batches, context, steps = list(params["batches"]), int(params["context"]), int(params["steps"])
    span, first = context + steps + 1, int(params["first"])
    source = bench.evaluation_text
    ids = prompts.encode_at_least(bench.tokenizer, source.text, (first + max(batches)) * span, source.name)
    thresholds = bench.calibration.thresholds(float(params["r_p"]))
    sequences = []
    for number in range(max(batches)):
        yield {"progress": 0.8 * number / max(batches), "doing": f"prefilling passage {number + 1} of {max(batches)}"}
        tokens = ids[(first + number) * span :][:span].to(bench.weights.device)
        sequences.append((tokens, prefill(bench.weights, tokens[:context], context).cache))
    for batch in batches:
        members = [Member(cache.fork(context, span), tokens) for tokens, cache in sequences[:batch]]
        decoder = BatchDecoder(bench.weights, members, thresholds)
        for _ in range(steps):
            decoder.step()
        counted = decoder.counted()
        yield {
            "kind": "union",
            "batch": batch,
            "u_b": counted.u_b,
            "counted_r_p": counted.r_p,
            "r_p": params["r_p"],
            "context": context,
            "steps": steps,
            "shape": dataclasses.asdict(bench.weights.shape),
            "identity": bench.weights.identity,
            "text": bench.text_label,
        }


def timed(params: Row) -> Iterator[Row]:
    """Task: per batch size one group of all modes at the sweep's two contexts and of both branches at two contexts
    between them, interleaved.

    The contexts are fixed: a pilot inside each process scattered by half and pointed one process in four at contexts
    that the crossing does not lie between. On a GPU the batches of a group share one full cache per sequence.
    """
    prepared = yield from live(lambda say: prepared_for(params, say))
    device = prepared.weights.device
    r_p, r_kv, steps = float(params["r_p"]), float(params["r_kv"]), int(params["timed_steps"])
    rows: list[Row] = []
    for number, (batch, (short, long)) in enumerate(params["sweeps"]):
        yield {"progress": number / len(params["sweeps"]), "doing": f"batched steps of {batch} sequences"}
        rows += measure(prepared, batch, members(short, long, r_p, r_kv), steps, int(params["order_seed"]))
    bandwidth = read_bandwidth(device)
    for row in rows:
        bandwidth = settled(row, bandwidth, device)
        yield {**row, "read_gbps": bandwidth.median_gbps, "note": params["note"]}


def members(short: int, long: int, r_p: float, r_kv: float) -> list[One]:
    """The batches of one group: all modes at both ends of a sweep, both branches at two contexts between them."""
    modes = ((1.0, 1.0), (r_p, 1.0), (1.0, r_kv))
    ends = [(n, *mode, "sweep") for n in (short, long) for mode in modes]
    contexts = [grid(round(short + share * (long - short))) for share in BETWEEN]
    return ends + [(n, *mode, "crossing") for n in contexts for mode in modes[1:]]


def measure(
    prepared: Prepared,
    batch: int,
    group: Sequence[One],
    steps: int,
    seed: int = 0,
) -> list[Row]:
    """Time batched decoders of (context, r_p, r_kv, part) that are alive together; one of every mode is checked against
    its sequences alone, at the shortest context: what can go wrong with a batch does not depend on it.
    """
    device = prepared.weights.device
    room = max(context for context, *_ in group) + steps + ROOM_STEPS
    lanes = batch_members.lanes(prepared, batch, room) if device.type == "cuda" else None
    decoders = {str(i): build(prepared, batch, *one[:3], steps, lanes) for i, one in enumerate(group)}
    shortest = {one[1:3]: i for i, one in sorted(enumerate(group), key=lambda entry: -entry[1][0])}
    found = {mode: check_step(decoders[str(i)]) for mode, i in shortest.items()}
    errors = {str(i): found[one[1:3]] for i, one in enumerate(group)}
    for i, one in enumerate(group):
        if shortest[one[1:3]] != i:
            decoders[str(i)].step()
    gc.collect()
    if device.type == "cuda":
        for decoder in decoders.values():
            decoder.capture()
    samples = interleave(decoders, steps, WARMUP_STEPS, seed)
    rows = []
    for name, (context, r_p, r_kv, part) in zip(decoders, group, strict=True):
        counted = decoders[name].counted()
        rows.append(
            {
                "kind": "batched",
                "mode": mode_name(r_p, r_kv),
                "group": batch,
                "part": part,
                "batch": batch,
                "context": context,
                "r_p": r_p,
                "r_kv": r_kv,
                **samples[name].row(),
                "gate_error": errors[name],
                "u_b": counted.u_b,
                "counted_r_p": counted.r_p,
                "counted_r_kv": counted.r_kv,
                "projection_bytes": counted.projection_bytes,
                "kv_bytes": counted.kv_bytes,
                "head_bytes": counted.head_bytes,
                "shape": dataclasses.asdict(prepared.weights.shape),
                "weight_bits": 8 * prepared.weights.embedding.element_size(),
                "kv_bits": 8 * prepared.cache.keys.element_size(),
                "llc_bytes": last_level_bytes(device),
                "text": prepared.text,
            }
        )
    release(decoders)
    return rows


def build(
    prepared: Prepared,
    batch: int,
    context: int,
    r_p: float,
    r_kv: float,
    steps: int,
    lanes: list[KVCache] | None = None,
) -> BatchDecoder:
    """A batch whose sequences share a prefix of `context` tokens, each in storage of its own, and go on differently:
    every sequence reads another passage of the text behind the longest prefill.

    lanes: full caches that the batch shares with others of its group (`batch_members`); None makes its own.
    """
    room = steps + ROOM_STEPS
    thresholds: Thresholds | None = prepared.calibration.thresholds(r_p) if r_p < 1 else None
    if lanes is None:
        lanes = [prepared.cache.fork(context, context + room) for _ in range(batch)]
    members = batch_members.snapkv(prepared, lanes, context, r_kv, room)
    return BatchDecoder(prepared.weights, members, thresholds)
