"""`artifact finetune --method sats`: a LoRA adapter for a thresholded model, trained on real text.

The last line of standard output is one compact JSON object: where the adapter lies and what it learnt.
"""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("finetune")
@click.option("--model", metavar="PATH", help="A Hugging Face directory or GGUF file; default: the embedded model.")
@click.option("--text", metavar="FILE", help="A text file instead of the default text; its second half is trained on.")
@click.option("--method", type=click.Choice(("sats", "cats")), default="sats", show_default=True, help="Thresholds.")
@click.option("--sparsity", type=float, default=0.5, show_default=True, help="Share of intermediate channels dropped.")
@click.option("--rank", type=click.IntRange(min=1), default=16, show_default=True, help="Rank of the update.")
@click.option("--steps", type=click.IntRange(min=1), default=200, show_default=True, help="At most as many.")
@click.option("--minutes", type=float, default=9.0, show_default=True, help="Training stops when they are over.")
@click.option("--learning-rate", type=float, default=1e-3, show_default=True, help="Peak of the schedule.")
@click.option("--sequence", type=click.IntRange(min=8), default=256, show_default=True, help="Tokens of a sequence.")
@click.option("--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Sequences of a step.")
@click.option("--out", metavar="DIR", help="Where the adapter goes; default: where `sats_finetuned` finds it.")
@click.option("--quick", is_flag=True, help="The small calibration of quick runs.")
def command(
    model: str | None,
    text: str | None,
    method: str,
    sparsity: float,
    rank: int,
    steps: int,
    minutes: float,
    learning_rate: float,
    sequence: int,
    batch: int,
    out: str | None,
    quick: bool,
) -> int:
    """Fine-tune a thresholded model with LoRA: at most ten minutes on two cores for the embedded model."""
    from artifact import profiles
    from artifact.measure import masked_plan
    from artifact.measure.finetune import Recipe
    from artifact.measure.finetune_cells import train

    profile = profiles.choose("embedded" if model is None else None, model, text)
    if model is not None and profile.name == "gpu":
        profile = profiles.choose("paper", model, text)
    profiles.check_model(profile)
    recipe = Recipe(
        rank=rank, steps=steps, minutes=minutes, learning_rate=learning_rate, sequence=sequence, batch=batch
    )
    arm = masked_plan.Arm(method, sparsity)
    target = None if out is None else Path(out)
    record = train(profile, masked_plan.sizes(profile, quick), arm, recipe, target, lambda share, doing: _say(doing))
    first, last = record["losses"][:5], record["losses"][-5:]
    found = {
        "out": record["out"],
        "steps": record["steps_done"],
        "tokens": record["tokens_seen"],
        "loss_first": round(sum(first) / len(first), 4),
        "loss_last": round(sum(last) / len(last), 4),
        "seconds": round(record["seconds"], 1),
    }
    click.echo(json.dumps(found, sort_keys=True, separators=(",", ":")))
    return 0


def _say(doing: str) -> None:
    click.echo(doing, err=True)
