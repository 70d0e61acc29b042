"""The measuring task of KV methods that keep a storage of their own: dense steps and steps of each arm, interleaved in
one process, with what each holds in memory and reads per step.

Every arm decodes after the full cache was released. Before any timing each arm takes a step against the reference; a
step that beat memory, or entries that are not those asked for, are an error. Simulated arms are refused: they save
nothing, so their time says nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from artifact.engine.decoder import Decoder
from artifact.engine.prepare import Prepared, grid
from artifact.engine.pruned import PrunedCache
from artifact.engine.reference import gate_step
from artifact.engine.timing import interleave, profile_ops
from artifact.kv.catekv import CateKV, identify
from artifact.measure import kv_arms
from artifact.measure.cells import (
    EXTRA_STEPS,
    PROFILE_STEPS,
    WARMUP_STEPS,
    last_level_bytes,
    live,
    prepared_for,
    settled,
)
from artifact.measure.kv_arms import Arm
from kernels.bandwidth import read_bandwidth

Row = dict[str, Any]


def decode(params: Row) -> Iterator[Row]:
    """Task: time the arms of params["arms"] at params["context"]; one row per arm.

    A catekv arm without head types gets those of the prompt itself at params["adaptive_share"]: they decide which heads
    are long, and time depends on how many are.
    """
    prepared = yield from live(lambda say: prepared_for(params, say))
    context, steps = int(params["context"]), int(params["steps"])
    arms = [kv_arms.from_record(record) for record in params["arms"]]
    if any(arm.simulated for arm in arms):
        raise ValueError("a simulated arm has no time of its own; take it out of the request")
    device = prepared.weights.device
    yield {"progress": 0.3, "doing": f"binding {len(arms)} arms at {context:,} tokens"}
    decoders = {arm.label: _build(prepared, arm, context, steps, params) for arm in arms}
    errors = {label: gate_step(decoder) for label, decoder in decoders.items()}
    if device.type == "cuda":
        for decoder in decoders.values():
            decoder.capture()
    yield {"progress": 0.6, "doing": f"decoding at {context:,} tokens"}
    samples = interleave(decoders, steps, WARMUP_STEPS)
    bandwidth = read_bandwidth(device)
    for arm in arms:
        decoder = decoders[arm.label]
        counted = decoder.counted()
        row = {
            "kind": "timing",
            "label": arm.label,
            "mode": arm.label,
            "method": arm.method,
            "context": context,
            **samples[arm.label].row(),
            "counted_r_kv": counted.r_kv,
            "projection_bytes": counted.projection_bytes,
            "kv_bytes": counted.kv_bytes,
            "head_bytes": counted.head_bytes,
            "retained_entries": _retained(decoder, steps),
            "storage_bytes": _storage(decoder),
            "gate_error": errors[arm.label],
            "ops_ms": profile_ops(decoder, PROFILE_STEPS),
            "llc_bytes": last_level_bytes(device),
            "shape": dataclasses.asdict(prepared.weights.shape),
            "text": prepared.text,
            "identity": prepared.weights.identity,
            "threads": torch.get_num_threads(),
            "note": params["note"],
        }
        bandwidth = settled(row, bandwidth, device)
        yield {**row, "read_gbps": bandwidth.median_gbps}


def _build(prepared: Prepared, arm: Arm, context: int, steps: int, params: Row) -> Decoder:
    """A decoder of one arm: dense on a copy of the cache (or its share), others without it."""
    room = steps + EXTRA_STEPS
    source, queries = prepared.cache, prepared.queries[grid(context)]
    cache = source.share(context) if prepared.synthetic else source.fork(context, context + room)
    tokens = torch.cat((prepared.tokens[:context], prepared.tokens[source.tokens : source.tokens + room + 1]))
    if arm.method == "catekv" and "adaptive" not in arm.options:
        found = CateKV(**arm.options).scores(cache, queries, prepared.scale())
        adaptive = identify(found[None], float(params["adaptive_share"]))
        arm = dataclasses.replace(arm, options={**arm.options, "adaptive": adaptive.int().tolist()})
    branch = kv_arms.bind(arm, cache, queries, prepared.scale(), room)
    return Decoder(prepared.weights, cache if branch is None else cache.released(), tokens, packed=branch)


def _retained(decoder: Decoder, steps: int) -> int:
    """Entries of the prompt that are stored over all layers and heads, whole or pruned."""
    taken = 1 + WARMUP_STEPS + steps
    branch = decoder.packed
    lengths = decoder.cache.lengths if branch is None else branch.lengths
    pruned = sum(layer.kept[:, :, 0].numel() for layer in branch.layers) if isinstance(branch, PrunedCache) else 0
    return int((lengths - taken).sum()) + pruned


def _storage(decoder: Decoder) -> int:
    """Bytes that the mode needs allocated for its cache, room for the run's tokens included."""
    if decoder.packed is not None:
        return decoder.packed.storage_bytes()
    keys = decoder.cache.keys
    live = int(decoder.cache.lengths.max())
    return 2 * keys[:, :, :live].numel() * keys.element_size()
