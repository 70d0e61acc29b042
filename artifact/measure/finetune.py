"""LoRA fine-tuning of a thresholded model with `peft`: thresholds frozen, forward pass sparse (sats, Tables 3 and 4).

The adapter sits on gate, up and down of every MLP. The mask is decided anew in every forward pass from the adapted gate
and the frozen limits; no gradient flows through the decision. Training text is the calibration split, which no window
is cut from. An adapter folder holds what `peft` writes, the gate limits and a record of how it was made.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from artifact import checks
from artifact.engine.checkpoints import open_checkpoint
from artifact.errors import UserError, one_line
from artifact.projection.lora import TARGETS
from artifact.projection.teal import hash_tokens

RECORD = "finetuned.json"
SCHEMA = 1
Say = Callable[[float, str], None]


@dataclass(frozen=True)
class Recipe:
    """What decides an adapter besides model, limits and text. alpha / rank scales the update; minutes bound the run.

    The paper's text prints no recipe: rank 16 and a linear decay are the field's usual choice.
    """

    rank: int = 16
    alpha: int = 32
    learning_rate: float = 1e-3
    sequence: int = 256
    batch: int = 2
    steps: int = 200
    warmup: int = 5
    minutes: float = 9.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "alpha", "sequence", "batch", "steps"):
            checks.count(name, getattr(self, name), 1)
        for name in ("learning_rate", "minutes"):
            checks.positive(name.replace("_", " "), getattr(self, name))


def finetune(
    model: str, limits: torch.Tensor, tokens: torch.Tensor, recipe: Recipe, out: Path, note: dict[str, Any],
    device: str = "cpu", dtype: torch.dtype = torch.float32, say: Say | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train an adapter on tokens (n,) and write it to `out`; returns the record, losses per step included.

    limits (L,): frozen thresholds on |SiLU(gate)|. note: what else the record should say. Raises UserError when the
    text is too short for one batch or `out` cannot be written.
    """
    import peft

    say = say or (lambda share, doing: None)
    batches = batches_of(tokens, recipe)
    torch.manual_seed(recipe.seed)
    base = load_masked(model, limits, device, dtype)
    config = peft.LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=0.0, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(base, config)
    losses = _train(adapted, batches, recipe, device, say)
    record = {
        "schema": SCHEMA,
        "model": open_checkpoint(model).identity,
        "recipe": asdict(recipe),
        "limits": limits.tolist(),
        "steps_done": len(losses),
        "tokens_seen": len(losses) * recipe.batch * recipe.sequence,
        "tokens_hash": hash_tokens(tokens),
        "losses": losses,
        **note,
    }
    _save(adapted, record, out)
    return record


def batches_of(tokens: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return (batches, batch, sequence): the text cut into sequences, in an order drawn from the seed."""
    usable = int(tokens.shape[0]) // recipe.sequence
    if usable < recipe.batch:
        raise UserError(
            f"{tokens.shape[0]:,} tokens hold {usable} sequences of {recipe.sequence}, a batch needs {recipe.batch}; "
            "give a longer text"
        )
    rows = tokens[: usable * recipe.sequence].view(usable, recipe.sequence)
    order = torch.randperm(usable, generator=torch.Generator().manual_seed(recipe.seed))
    count = usable // recipe.batch
    return rows[order[: count * recipe.batch]].view(count, recipe.batch, recipe.sequence)


def load_masked(model: str, limits: torch.Tensor, device: str, dtype: torch.dtype) -> Any:
    """The transformers model of a checkpoint with the gate mask in every MLP, its own weights frozen."""
    import transformers

    checkpoint = open_checkpoint(model)
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder), dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{checkpoint.folder.name} cannot be loaded for training ({one_line(error)})") from error
    layers = loaded.model.layers
    if len(layers) != limits.shape[0]:
        raise UserError(f"gate limits for {limits.shape[0]} layers, the model has {len(layers)}; calibrate it")
    for layer, limit in zip(layers, limits.tolist(), strict=True):
        layer.mlp.forward = _masked_forward(layer.mlp, limit)
    loaded.requires_grad_(False)
    loaded.to(torch.device(device))
    return loaded


def _masked_forward(mlp: Any, limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The MLP with channels of small |SiLU(gate)| dropped; projections are looked up late: adapters replace them."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        silu = functional.silu(mlp.gate_proj(x))
        kept = torch.where(silu.detach().abs() <= limit, torch.zeros_like(silu), silu)
        result: torch.Tensor = mlp.down_proj(kept * mlp.up_proj(x))
        return result

    return forward


def _train(adapted: Any, batches: torch.Tensor, recipe: Recipe, device: str, say: Say) -> list[float]:
    """AdamW with warm-up and linear decay over steps or minutes, whichever is used up first; the loss of every step."""
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0)
    adapted.train()
    begin, losses = time.monotonic(), []
    for step, batch in enumerate(_cycle(batches, recipe.steps)):
        spent = (time.monotonic() - begin) / (60 * recipe.minutes)
        if spent >= 1:
            break
        progress = max(step / recipe.steps, spent)
        rate = min((step + 1) / recipe.warmup, 1.0) if recipe.warmup else 1.0
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate * (1 - progress)
        ids = batch.to(device)
        loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        if not bool(torch.isfinite(loss)):
            raise UserError(f"the loss is {float(loss.detach())} after {step} steps; lower the learning rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        say(progress, f"step {step + 1}: loss {losses[-1]:.3f}")
    return losses


def _cycle(batches: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        yield batches[step % len(batches)]


def _save(adapted: Any, record: dict[str, Any], out: Path) -> None:
    """Write adapter and record under another name, then move them into place."""
    scratch = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        adapted.save_pretrained(str(scratch))
        (scratch / "README.md").unlink(missing_ok=True)  # a form that peft leaves to be filled in
        _forget_place(scratch / "adapter_config.json")
        (scratch / RECORD).write_text(json.dumps(record, sort_keys=True, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        os.replace(scratch, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another --out") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _forget_place(config: Path) -> None:
    """Leave out where the base model lay on this machine."""
    stored = json.loads(config.read_text(encoding="utf-8"))
    stored["base_model_name_or_path"] = None
    config.write_text(json.dumps(stored, sort_keys=True, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of an adapter folder; None where there is none that this version can read."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else None
