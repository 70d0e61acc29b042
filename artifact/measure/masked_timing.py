"""The measuring task of gate-mask throughput: decode steps of several arms, interleaved in one process.

With trained weights the arms go on with real text behind a short prompt, so that routing meets the tokens it meets in
use. With synthetic weights of a known model's shape thresholds come from its own activations, tables and adapters are
random: speed needs shapes, shares and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from artifact import gpu_state
from artifact.engine import memory_plan, prepare
from artifact.engine.checkpoints import open_checkpoint
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prefill import prefill
from artifact.engine.reference import gate_step
from artifact.engine.timing import interleave, profile_ops
from artifact.measure import masked_bench, quality
from artifact.measure.cells import (
    EXTRA_STEPS,
    KEEP_TOLERANCE,
    PROFILE_STEPS,
    WARMUP_STEPS,
    is_name,
    last_level_bytes,
    settled,
)
from artifact.measure.masked_cells import opened
from artifact.measure.masked_plan import Arm, Sizes, arm_of, timed_formats
from artifact.measure.quality_cells import profile_params
from artifact.profiles import Profile
from artifact.projection import cats, gate_stats, routing, sats
from artifact.projection.branch import Projection
from artifact.projection.masked import GateMask, MaskedSteps
from artifact.records import Cell, Run
from artifact.shapes import Shape, known_shape
from kernels.bandwidth import read_bandwidth

Row = dict[str, Any]
SHARE_TOLERANCE = 0.05  # of projection bytes: half of the tokens are routed on other text, here a third to two thirds
SYNTHETIC_TOKENS = 512


@dataclass(frozen=True)
class Setting:
    """What one timing cell runs on. model: another than the profile's, such as a known shape; dtype of its weights."""

    model: str
    dtype: str


def settings(run: Run, claim: str, arms: Sequence[Arm], tokens: int, models: Sequence[str]) -> list[Setting]:
    """Every model in every format that is timed here. What the GPU has no room for is recorded with the reason."""
    free = gpu_state.free_bytes() if run.profile.device == "cuda" else None
    found: list[Setting] = []
    missing: list[Row] = []
    for one in (Setting(model, dtype) for model in models for dtype in timed_formats(run.profile)):
        reason = "" if free is None else _no_room(one, run.profile, arms, tokens, free)
        if not reason:
            found.append(one)
            continue
        row = {"kind": "no-room", "model": one.model or "this model", "dtype": one.dtype, "reason": reason}
        missing.append(row)
    if missing:
        run.record(claim, "no-room", missing)
    return found


def _no_room(one: Setting, profile: Profile, arms: Sequence[Arm], tokens: int, free: int) -> str:
    """Return why a setting does not fit, or nothing."""
    name = one.model or profile.model
    shape = known_shape(name) if is_name(name) else open_checkpoint(name).shape
    adapters = sum(bool(arm.adapter) and arm.fused for arm in arms)
    item: int = getattr(torch, one.dtype).itemsize
    need = memory_plan.masked_bytes(shape, item, tokens + EXTRA_STEPS, len(arms), adapters)
    if need <= free:
        return ""
    return f"{shape.name} in {one.dtype} needs {need / 1e9:.0f} GB, the GPU has {free / 1e9:.0f} GB free"


def timing_cell(
    run: Run, claim: str, sizes: Sizes, arms: Sequence[Arm], context: int, steps: int, block: int, setting: Setting
) -> Cell:
    """A process that times every arm at one context in one setting."""
    params = profile_params(run.profile) | {"sizes": sizes.record(), "arms": [arm.record() for arm in arms]}
    params |= {"context": context, "steps": steps, "order_seed": block, "dtype": setting.dtype}
    params |= {"model": setting.model} if setting.model else {}
    key = f"timing-{setting.model or 'model'}-{setting.dtype}-{block}"
    return Cell(claim, key, "artifact.measure.masked_timing:timed", params, block, 3600.0)


def timed(params: Row) -> Iterator[Row]:
    """Task: gate, time and count every arm; one row per arm."""
    arms = [arm_of(record) for record in params["arms"]]
    context, steps = int(params["context"]), int(params["steps"])
    yield {"progress": 0.0, "doing": f"preparing {len(arms)} arms"}
    make = _synthetic if is_name(params["model"]) else _trained
    weights, tokens, branches, label = make(params, arms, context + steps + EXTRA_STEPS + 1)
    prompt = prefill(weights, tokens[:context], context).cache
    decoders = {
        arm.label: Decoder(
            weights, prompt.fork(context, context + steps + EXTRA_STEPS), tokens.clone(), branches[arm.label]
        )
        for arm in arms
    }
    yield {"progress": 0.5, "doing": "checking one step of every arm, then timing"}
    errors = {name: gate_step(decoder) for name, decoder in decoders.items()}
    if weights.device.type == "cuda":
        for decoder in decoders.values():
            decoder.capture()
    samples = interleave(decoders, steps, WARMUP_STEPS, int(params["order_seed"]))
    bandwidth = read_bandwidth(weights.device)
    counts = {arm.label: counted(arm, decoders[arm.label], steps) for arm in arms}
    for arm in arms:
        decoder = decoders[arm.label]
        row: Row = {
            "kind": "timing",
            "label": arm.label,
            "mode": arm.label,
            **samples[arm.label].row(),
            "context": context,
            "steps": steps,
            "gate_error": errors[arm.label],
            "ops_ms": profile_ops(decoder, PROFILE_STEPS),
            "llc_bytes": last_level_bytes(weights.device),
            "model": weights.shape.name,
            "identity": weights.identity,
            "dtype": str(weights.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "text": label,
        }
        row |= counts[arm.label]
        bandwidth = settled(row, bandwidth, weights.device)
        yield row | arm.record() | {"read_gbps": bandwidth.median_gbps}


def counted(arm: Arm, decoder: Decoder, steps: int) -> Row:
    """What the timed steps read. Raises RuntimeError when an arm did not do what it says."""
    found = decoder.counted()
    shape, projections = decoder.weights.shape, decoder.projections
    share = projections.masked_share(steps) if isinstance(projections, MaskedSteps) else 0.0
    gated = 2 * shape.hidden * shape.intermediate / shape.projection_params
    low_rank = 3 * projections.rank * (shape.hidden + shape.intermediate) if isinstance(projections, MaskedSteps) else 0
    expected = 1 - arm.sparsity * arm.share * gated
    tolerance = KEEP_TOLERANCE + (SHARE_TOLERANCE if arm.share < 1 else 0.0) + low_rank / shape.projection_params
    if abs(found.r_p - expected) > (tolerance if arm.method != "dense" else 0.0):
        raise RuntimeError(f"{arm.label} read {found.r_p:.3f} of the projection bytes, {expected:.3f} was asked for")
    return {
        "counted_r_p": found.r_p,
        "masked_share": share,
        "projection_bytes": found.projection_bytes,
        "kv_bytes": found.kv_bytes,
        "head_bytes": found.head_bytes,
        "step_bytes": found.step_bytes,
    }


Prepared = tuple[Weights, torch.Tensor, dict[str, Projection | None], str]


def _trained(params: Row, arms: Sequence[Arm], needed: int) -> Prepared:
    """Weights, evaluation tokens (needed,), a branch per arm, and where the text comes from."""
    bench = opened(params, [])
    source = bench.evaluation_text
    cut = quality.windows(bench.tokenizer, source.text, quality.Protocol(needed - 2, 1, 1), source.name)
    bench.require_apart(cut.tokens)
    tokens = cut.tokens[0].to(bench.weights.device)
    read = cut.tokens[0, int(params["context"]) :]
    return bench.weights, tokens, {arm.label: bench.branch(arm, read) for arm in arms}, bench.text_label


def _synthetic(params: Row, arms: Sequence[Arm], needed: int) -> Prepared:
    shape = known_shape(params["model"])
    prepared = prepare.prepare_synthetic(shape, params["device"], getattr(torch, params["dtype"]), SYNTHETIC_TOKENS)
    weights = prepared.weights
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab, (needed,), generator=generator).to(weights.device)
    statistics = gate_stats.collect(weights, [tokens[:SYNTHETIC_TOKENS]], rows=64, skip=needed // 8)
    return weights, tokens, synthetic_branches(weights, statistics, arms), prepared.text


def synthetic_branches(
    weights: Weights, statistics: gate_stats.GateStatistics, arms: Sequence[Arm]
) -> dict[str, Projection | None]:
    """Branches whose thresholds are the synthetic model's own and whose tables know nothing."""
    quantiles = torch.stack([gate_stats.quantile_table(gate) for gate in statistics.gates])
    targets = tuple(sorted({arm.sparsity for arm in arms if arm.method == "sats"}))
    curves = sats.curves(weights, statistics, targets) if targets else None
    found: dict[str, Projection | None] = {}
    for arm in arms:
        if arm.method == "dense":
            found[arm.label] = None
            continue
        if arm.method == "sats" and curves is not None:
            mask = curves.mask(curves.budget(arm.sparsity))
        else:
            mask = cats.thresholds(quantiles, arm.sparsity)
        found[arm.label] = masked_bench.adapted(_routed(mask, arm, weights.shape), arm, weights)
    return found


def _routed(mask: GateMask, arm: Arm, shape: Shape) -> GateMask:
    if arm.share == 1:
        return mask
    table = routing.random_scores(shape.vocab, arm.seed)
    return GateMask(mask.limits, table.table(table.threshold(torch.arange(shape.vocab), arm.share)))
