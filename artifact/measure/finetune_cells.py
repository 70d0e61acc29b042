"""Where adapters lie, and the task that trains one within a claim's minutes when none was made beforehand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from artifact.measure.finetune import Recipe, finetune, read_record
from artifact.measure.masked_bench import MaskedBench, adapter_place, open_bench
from artifact.measure.masked_plan import Arm, Sizes, arm_of, sizes_of
from artifact.measure.quality_cells import profile_params
from artifact.profiles import Profile
from artifact.records import Cell, Run

Row = dict[str, Any]


def adapter_folder(identity: str, text_sha256: str, limits: torch.Tensor, arm: Arm) -> Path:
    """Where an adapter for a model, a text and frozen limits lies."""
    named = f"{identity}|{text_sha256}|{[round(limit, 6) for limit in limits.tolist()]}"
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    return adapter_place(f"{arm.label}-{digest}")


def train(
    profile: Profile, sizes: Sizes, arm: Arm, recipe: Recipe, out: Path | None, say: Callable[[float, str], None]
) -> Row:
    """Calibrate, train on the calibration text past the calibration tokens, save; returns the record and `out`."""
    begin = time.monotonic()
    bench = open_bench(profile.model, profile.text, profile.device, profile.dtype, sizes, say)
    return _train(bench, profile.model, profile.device, profile.dtype, arm, recipe, out, say) | {
        "seconds": time.monotonic() - begin
    }


def _train(
    bench: MaskedBench, model: str, device: str, dtype: str, arm: Arm, recipe: Recipe, out: Path | None,
    say: Callable[[float, str], None],
) -> Row:  # fmt: skip
    limits = bench.calibration.mask(arm.method, arm.sparsity).limits
    folder = out or adapter_folder(bench.weights.identity, bench.calibration_text.sha256, limits, arm)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokens = torch.cat((bench.corpus, bench.held_out))
    note = {"arm": asdict(arm), "text": bench.calibration_text.label}
    # Half-precision gradients of a small adapter vanish; on a GPU the frozen weights stay in bfloat16.
    wanted = torch.bfloat16 if device == "cuda" else getattr(torch, dtype)
    record = finetune(model, limits, tokens, recipe, folder, note, device, wanted, say)
    return record | {"out": str(folder)}


def adapter_cell(run: Run, claim: str, sizes: Sizes, arm: Arm, recipe: Recipe) -> Cell:
    """A cell that finds the adapter of an arm, or trains a short one."""
    params = profile_params(run.profile) | {"sizes": sizes.record(), "arm": arm.record(), "recipe": asdict(recipe)}
    task = "artifact.measure.finetune_cells:found_or_trained"
    return Cell(claim, f"adapter-{arm.label}", task, params, timeout_s=3600.0)


def found_or_trained(params: Row) -> Iterator[Row]:
    """Task: one row naming the adapter, how it was trained and its losses."""
    arm, recipe = arm_of(params["arm"]), Recipe(**params["recipe"])
    said: list[Row] = []
    yield {"progress": 0.0, "doing": "loading and calibrating"}
    place = (params["model"], params["text"], params["device"], params["dtype"])
    bench = open_bench(*place, sizes_of(params["sizes"]))
    limits = bench.calibration.mask(arm.method, arm.sparsity).limits
    folder = adapter_folder(bench.weights.identity, bench.calibration_text.sha256, limits, arm)
    record = read_record(folder)
    made_before = record is not None
    if record is None:
        yield {"progress": 0.3, "doing": f"fine-tuning {arm.label} for at most {recipe.minutes:g} minutes"}
        record = _train(
            bench, params["model"], params["device"], params["dtype"], arm, recipe, None,
            lambda share, doing: said.append({"progress": share, "doing": doing}),
        )  # fmt: skip
    yield {
        "kind": "adapter",
        "label": arm.label,
        "adapter": folder.name,
        "made_before": made_before,
        "recipe": record["recipe"],
        "steps_done": record["steps_done"],
        "tokens_seen": record["tokens_seen"],
        "losses": record["losses"],
        "text": record["text"],
    }
