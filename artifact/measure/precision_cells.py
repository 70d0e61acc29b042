"""The measuring task of quantised weights and of a fixed KV budget: sweep and crossing of each in one group.

Caches are those of the model as loaded; only what a step reads of the weights changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from artifact.account import Mode
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.prepare import GRID_TOKENS, Prepared, grid
from artifact.engine.reference import gate_step
from artifact.engine.timing import interleave, release
from artifact.judge.crossing import around
from artifact.judge.levels import with_levels
from artifact.judge.precision import Variant, crossing
from artifact.kv.retain import budget
from artifact.kv.snapkv import SnapKV
from artifact.measure.cells import live, prepared_for, unread_cache
from artifact.projection.quantised import Precision, to_precision

Row = dict[str, Any]
TIMED, PILOT = "artifact.measure.precision_cells:timed", "artifact.measure.precision_cells:pilot"
WARMUP_STEPS = 2
ROOM_STEPS = WARMUP_STEPS + 1  # and the step that is checked
PILOT_STEPS = 10
SPREAD = (0.7, 1.3)  # crossing contexts, as shares of the predicted crossing
# A handful of tokens of one passage was seen to read 43% to 52% at 50%; thresholds that are ignored read everything.
KEEP_TOLERANCE = 0.1
MODES = (Mode.DENSE, Mode.PROJECTION, Mode.KV)
One = tuple[int, Mode, str]  # context, mode, part
Ends = tuple[int, int]  # the contexts of a sweep


def pilot(params: Row) -> Iterator[Row]:
    """Task: per variant a short sweep that only chooses the contexts of the blocks; no verdict reads it."""
    for row in timed(params):
        yield row | {"kind": "pilot"} if "kind" in row else row


def timed(params: Row) -> Iterator[Row]:
    """Task: per variant sweep and crossing rows in one group. params["variants"]: [record, ends, crossing contexts]."""
    ratios, steps = (float(params["r_p"]), float(params["r_kv"])), int(params["steps"])
    prepared = yield from live(lambda say: prepared_for(params, say))
    for number, (record, ends, contexts) in enumerate(params["variants"]):
        variant = Variant(**record)
        yield {"progress": number / len(params["variants"]), "doing": f"{variant.name}: sweep and crossing"}
        precision = None if variant.bits is None else to_precision(prepared.weights, variant.bits)
        group: list[One] = [(n, mode, "sweep") for n in ends for mode in MODES]
        group += [(n, mode, "crossing") for n in contexts for mode in MODES[1:]]
        yield from measure(prepared, precision, variant, group, ratios, steps, int(params["order_seed"]))


def crossing_contexts(rows: Sequence[Row], variant: Variant, ends: Ends, ratios: tuple[float, float]) -> list[int]:
    """Contexts of the crossing rows: around what the pilot's rows of a variant predict, or its n*."""
    mine = with_levels([row for row in rows if row.get("group") == variant.name])
    short, long = ends
    star = variant.n_star(mine[0], *ratios)
    # A pilot has no crossing rows; its prediction does not need them.
    predicted = crossing(mine, variant, *ratios).predicted
    centre = predicted if math.isfinite(predicted) and short < predicted < long else star
    return around(centre, SPREAD, GRID_TOKENS, short, long)


def measure(
    prepared: Prepared,
    precision: Precision | None,
    variant: Variant,
    group: Sequence[One],
    ratios: tuple[float, float],
    steps: int,
    seed: int = 0,
) -> list[Row]:
    """Time decoders that are alive together; one of every mode takes its first step against the reference."""
    unread = unread_cache(prepared, [n for n, mode, _ in group if mode is Mode.KV], steps + ROOM_STEPS)
    decoders = {str(i): build(prepared, precision, variant, one, ratios, steps, unread) for i, one in enumerate(group)}
    errors: dict[Mode, float] = {}
    for (_, mode, _), decoder in zip(group, decoders.values(), strict=True):
        if mode in errors:
            decoder.step()
        else:
            errors[mode] = gate_step(decoder)
    samples = interleave(decoders, steps, WARMUP_STEPS, seed)
    rows = []
    for name, (context, mode, part) in zip(decoders, group, strict=True):
        counted = decoders[name].counted()
        kept = channels_read(counted.projection_bytes, prepared, precision)
        check(mode, kept, ratios[0], decoders[name], budget(context, variant.r_kv(context, ratios[1])), steps)
        rows.append(
            {
                "kind": "precision",
                "group": variant.name,
                "variant": dataclasses.asdict(variant),
                "part": part,
                "mode": mode.value,
                "context": context,
                **samples[name].row(),
                "gate_error": errors[mode],
                "counted_r_p": kept,
                "counted_r_kv": counted.r_kv,
                "projection_bytes": counted.projection_bytes,
                "kv_bytes": counted.kv_bytes,
                "head_bytes": counted.head_bytes,
                "weight_bits": 8.0 * prepared.weights.embedding.element_size()
                if precision is None
                else precision.weight_bits,
                "loaded_weight_bits": 8 * prepared.weights.embedding.element_size(),
                "kv_bits": 8 * prepared.cache.keys.element_size(),
                "shape": dataclasses.asdict(prepared.weights.shape),
                "text": prepared.text,
            }
        )
    release(decoders)
    return rows


def build(
    prepared: Prepared,
    precision: Precision | None,
    variant: Variant,
    one: One,
    ratios: tuple[float, float],
    steps: int,
    unread: KVCache | None,
) -> Decoder:
    """One decoder on a cache of its own (of KV members `unread`), going on with the text behind the longest prefill."""
    context, mode, _ = one
    room = steps + ROOM_STEPS
    packed = None
    if mode is not Mode.KV or unread is None:
        cache = prepared.cache.share(context) if prepared.synthetic else prepared.cache.fork(context, context + room)
    else:
        cache = unread.share(context)
    if mode is Mode.KV:
        share, queries = variant.r_kv(context, ratios[1]), prepared.queries[grid(context)]
        packed = SnapKV().select(cache, queries, share, prepared.scale(), room)
    thresholds = prepared.calibration.thresholds(ratios[0]) if mode is Mode.PROJECTION else None
    passage = prepared.tokens[prepared.cache.tokens :][: room + 1]
    tokens = torch.cat((prepared.tokens[:context], passage))
    if precision is None:
        return Decoder(prepared.weights, cache, tokens, thresholds, packed)
    return Decoder(precision.weights, cache, tokens, precision.branch(thresholds), packed)


def channels_read(projection_bytes: float, prepared: Prepared, precision: Precision | None) -> float:
    """Share of the channels that was read, scales apart."""
    if precision is None:
        shape = prepared.weights.shape
        item = prepared.weights.embedding.element_size()
        return projection_bytes / (shape.layers * shape.projection_params * item)
    return (projection_bytes - precision.scale_bytes) / (precision.dense_bytes - precision.scale_bytes)


def check(mode: Mode, kept: float, r_p: float, decoder: Decoder, entries: int, steps: int) -> None:
    """Raise RuntimeError when a mode did not read what it says."""
    wanted = r_p if mode is Mode.PROJECTION else 1.0
    if abs(kept - wanted) > (KEEP_TOLERANCE if wanted < 1 else 1e-9):
        raise RuntimeError(f"{mode.value} was to read {wanted} of the channels and read {kept:.3f}")
    if mode is Mode.KV and int(decoder.attended.max()) != entries + ROOM_STEPS + steps:
        found = int(decoder.attended.max())
        raise RuntimeError(f"{entries + ROOM_STEPS + steps} cache entries were expected, {found} are there")
