"""The measuring task of batches at equal memory: batched steps of dense decoding and of CateKV, each with as many
sequences as one memory budget holds, every sequence in storage of its own.

A weight is read once per step for all sequences; attention is a launch per sequence and layer, which at long contexts
moves tens to hundreds of megabytes, so that its microsecond is lost in it. Before any timing a short batch of each mode
takes a step against its sequences alone. A mode that holds more than the budget, or whose sequences share storage, is
an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from artifact.engine.batch import BatchDecoder
from artifact.engine.batch_check import check_step
from artifact.engine.models import Weights
from artifact.engine.prepare import Prepared
from artifact.engine.timing import Samples, interleave, release
from artifact.kv.catekv import CateKV
from artifact.measure import batch_members
from artifact.measure.cells import last_level_bytes, live, prepared_for, settled
from kernels.bandwidth import read_bandwidth

Row = dict[str, Any]
TASK = "artifact.measure.equal_memory:timed"
WARMUP_STEPS = 2
ROOM_STEPS = WARMUP_STEPS + 1  # and the first step, after which launches are captured
CHECK_TOKENS = 1024  # a wrong entry shows among few others


def timed(params: Row) -> Iterator[Row]:
    """Task: one row per mode of params["batches"] at params["context"]; interleaved where both fit side by side.

    params["methods"]: CateKV's parameters at the timed context and at that of the check.
    """
    prepared = yield from live(lambda say: prepared_for(params, say))
    device, sizes = prepared.weights.device, dict(params["batches"])
    checked = {label: _checked(prepared, label, int(batch), params) for label, batch in sizes.items()}
    rows: list[Row] = []
    for labels in [list(sizes)] if params["together"] else [[label] for label in sizes]:
        yield {"progress": 0.5, "doing": f"batched steps at {int(params['context']):,} tokens, {' and '.join(labels)}"}
        rows += _measured(prepared, {label: int(sizes[label]) for label in labels}, params)
    bandwidth = read_bandwidth(device)
    for row in rows:
        bandwidth = settled(row, bandwidth, device)
        yield {**row, "gate_error": checked[row["label"]], "read_gbps": bandwidth.median_gbps}


def _measured(prepared: Prepared, sizes: dict[str, int], params: Row) -> list[Row]:
    """Batches that are alive together."""
    context, steps = int(params["context"]), int(params["timed_steps"])
    device = prepared.weights.device
    decoders: dict[str, BatchDecoder] = {}
    held: dict[str, int] = {}
    for label, batch in sizes.items():
        before = _allocated(device)
        # On a CPU the prefill is a file that other processes read.
        own, room = device.type == "cpu", steps + ROOM_STEPS
        decoders[label] = build(prepared, label, batch, context, room, params["methods"][0], params, own)
        decoders[label].step()
        if device.type == "cuda":
            decoders[label].capture()
        held[label] = _held(prepared, decoders[label], _allocated(device) - before)
        if held[label] > params["budget_bytes"]:
            raise RuntimeError(f"{label} holds {held[label]:,} bytes, {params['budget_bytes']:,} were to be its memory")
    samples = interleave(decoders, steps, WARMUP_STEPS, int(params["order_seed"]))
    rows = [_row(prepared, label, decoders[label], samples[label], held[label], params) for label in decoders]
    release(decoders)
    return rows


def _row(prepared: Prepared, label: str, decoder: BatchDecoder, samples: Samples, held: int, params: Row) -> Row:
    counted, batch = decoder.counted(), len(decoder.sequences)
    return {
        "kind": "equal_memory",
        "label": label,
        "mode": label,
        "batch": batch,
        "context": int(params["context"]),
        **samples.row(),
        "interleaved": bool(params["together"]),
        "held_bytes": held,
        "budget_bytes": int(params["budget_bytes"]),
        "storage_bytes": sum(storage_of(decoder)),
        "counted_r_kv": counted.r_kv,
        "projection_bytes": counted.projection_bytes,
        "kv_bytes": counted.kv_bytes,
        "head_bytes": counted.head_bytes,
        "llc_bytes": last_level_bytes(prepared.weights.device),
        "shape": dataclasses.asdict(prepared.weights.shape),
        "identity": prepared.weights.identity,
        "text": prepared.text,
        "threads": torch.get_num_threads(),
        "note": params["note"],
    }


def build(
    prepared: Prepared,
    label: str,
    batch: int,
    context: int,
    room: int,
    method: Row,
    params: Row,
    own: bool = False,
) -> BatchDecoder:
    """A batch of one mode. own: the first dense sequence gets a copy of the prefill, too, in place of the prefill.

    Raises RuntimeError when two sequences share storage.
    """
    if label == "catekv":
        share = float(params["adaptive_share"])
        members = batch_members.catekv(prepared, batch, context, CateKV(**method), share, room)
    else:
        lanes = batch_members.lanes(prepared, batch, context + room, own)
        members = batch_members.snapkv(prepared, lanes, context, 1.0, room)
    decoder = BatchDecoder(prepared.weights, members)
    places = {(one.packed or one.cache).keys.data_ptr() for one in decoder.sequences}  # type: ignore[union-attr]
    if len(places) != batch:
        raise RuntimeError(f"{batch} sequences of {label} lie in {len(places)} storages")
    return decoder


def storage_of(decoder: BatchDecoder) -> list[int]:
    """Bytes allocated for the cache of every sequence, whole tensors, room for further tokens included."""
    return [
        2 * one.cache.keys.numel() * one.cache.keys.element_size() if one.packed is None else one.packed.storage_bytes()
        for one in decoder.sequences
    ]


def _checked(prepared: Prepared, label: str, batch: int, params: Row) -> float:
    context = min(CHECK_TOKENS, int(params["context"]))
    decoder = {label: build(prepared, label, batch, context, 2, params["methods"][1], params, own=True)}
    error = check_step(decoder[label])
    release(decoder)
    return error


def _held(prepared: Prepared, decoder: BatchDecoder, added: int) -> int:
    """Bytes that the mode needs: weights, caches and, on a GPU, what was allocated with it.

    Workspaces that kernels share are counted for the mode that was bound first; 20 MB at sixteen sequences.
    """
    caches = storage_of(decoder)
    first = decoder.sequences[0]
    lent = first.packed is None and first.cache.keys.data_ptr() == prepared.cache.keys.data_ptr()
    new = sum(caches) - (caches[0] if lent else 0)
    return weights_of(prepared.weights) + sum(caches) + max(0, added - new)


def weights_of(weights: Weights) -> int:
    """Bytes of the tensors of a model in the one layout that dense steps read."""
    tables = [weights.embedding] if weights.head is weights.embedding else [weights.embedding, weights.head]
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return sum(one.numel() * one.element_size() for one in [*tables, *(m.w for m in matrices)])


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
