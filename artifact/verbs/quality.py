"""`artifact quality --model PATH --mode ...`: perplexity and retrieval of one configuration of any supported model.

The last line of standard output is one compact JSON object with the same numbers as the lines above it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from artifact.errors import UserError

MODES = ("dense", "projection", "kv", "window", "both")


@click.command("quality")
@click.option("--model", metavar="PATH", help="A Hugging Face directory or GGUF file; default: the embedded model.")
@click.option("--mode", type=click.Choice(MODES), default="both", show_default=True, help="Which branches are on.")
@click.option("--r-p", type=float, default=0.7, show_default=True, help="Projection keep ratio.")
@click.option("--r-kv", type=float, default=0.3, show_default=True, help="KV keep ratio.")
@click.option("--text", metavar="FILE", help="A text file instead of the default text.")
@click.option("--context", type=click.IntRange(min=128), default=2048, show_default=True, help="Prefilled tokens.")
@click.option("--scored", type=click.IntRange(min=1), default=128, show_default=True, help="Scored tokens per window.")
@click.option("--windows", type=click.IntRange(min=1), default=4, show_default=True, help="Disjoint windows.")
@click.option(
    "--placements", type=click.IntRange(min=0), default=4, show_default=True, help="Per retrieval test; 0 skips them."
)
@click.option(
    "--longbench", metavar="TASK", help="Also a LongBench task by its own prompt and metric, such as hotpotqa."
)
@click.option("--longbench-folder", metavar="DIR", help="Where TASK.jsonl lies; default: the hub, or what is cached.")
@click.option(
    "--longbench-records", type=click.IntRange(min=1), default=10, show_default=True, help="The first of them."
)
@click.option("--json", "as_json", is_flag=True, help="Only the JSON line on standard output.")
def command(
    model: str | None,
    mode: str,
    r_p: float,
    r_kv: float,
    text: str | None,
    context: int,
    scored: int,
    windows: int,
    placements: int,
    longbench: str | None,
    longbench_folder: str | None,
    longbench_records: int,
    as_json: bool,
) -> int:
    """Print perplexity and retrieval of one configuration beside dense decoding."""
    from artifact import profiles
    from artifact.measure.quality import Protocol
    from artifact.tasks import longbench as tasks

    profile = profiles.choose("embedded", model, text)
    profiles.check_model(profile)
    place = None if longbench_folder is None else Path(longbench_folder)
    if longbench is not None:
        tasks.load(longbench, place, 1)  # before minutes of scoring: a wrong name costs nothing
    found = evaluate(profile, mode, r_p, r_kv, Protocol(context, scored, windows), placements)
    if longbench is not None:
        arms = _arms(mode, r_p, r_kv)
        found["longbench"] = long_tasks(profile, arms, longbench, place, longbench_records)
    if not as_json:
        _card(found)
    click.echo(json.dumps(found, sort_keys=True, separators=(",", ":")))
    return 0


def evaluate(profile: Any, mode: str, r_p: float, r_kv: float, protocol: Any, placements: int) -> dict[str, Any]:
    """Score the windows and answer the prompts of one configuration and of dense decoding.

    Raises UserError for a ratio outside (0, 1], a text too short or a prompt that does not fit the model's window.
    """
    from artifact.measure import quality, quality_cells

    arms = _arms(mode, r_p, r_kv)
    arm = arms[-1]
    request = quality_cells.profile_params(profile) | {"arms": [one.record() for one in arms]}
    window_request = {
        "context": protocol.context_tokens,
        "scored": protocol.scored_tokens,
        "windows": protocol.windows,
        "chosen": list(range(protocol.windows)),
    }
    rows = [row for row in quality_cells.scored(request | window_request) if "kind" in row]
    losses = quality.losses(rows)
    change = quality.increase(losses, arm.label)
    own = next(row for row in rows if row["label"] == arm.label)
    found: dict[str, Any] = {
        "configuration": arm.record(),
        "ppl": quality.perplexity(losses, arm.label).point,
        "dense_ppl": quality.perplexity(losses, "dense").point,
        "increase": {"point": change.point, "low": change.low, "high": change.high, "windows": change.n},
        "counted_r_p": own["counted_r_p"],
        "counted_r_kv": own["counted_r_kv"],
        "protocol": own["protocol"],
        "text": own["text"],
    }
    return found | {"retrieval": _retrieval(request, protocol.context_tokens, placements)}


def _arms(mode: str, r_p: float, r_kv: float) -> list[Any]:
    """Dense decoding and, where it is another, the configuration asked for."""
    arm = configuration(mode, r_p, r_kv)
    return [configuration("dense", 1.0, 1.0)] + ([arm] if arm.kind != "dense" else [])


def long_tasks(profile: Any, arms: list[Any], task: str, folder: Path | None, records: int) -> dict[str, Any]:
    """Mean score of a LongBench task by configuration. UserError for an unknown task or data that cannot be had."""
    from artifact.measure.longbench_answers import ask
    from artifact.measure.quality_cells import profile_params
    from artifact.measure.workbench import open_workbench

    params = profile_params(profile)
    bench = open_workbench(
        params["model"], params["text"], params["device"], params["dtype"], lambda share, doing: None
    )
    scores: dict[str, list[float]] = {}
    for row in ask(bench, task, folder, records, arms):
        scores.setdefault(row["label"], []).append(row["score"])
    means = {label: sum(own) / len(own) for label, own in scores.items()}
    return {"task": task, "records": len(scores["dense"]), "score": means}


def configuration(mode: str, r_p: float, r_kv: float) -> Any:
    """The configuration that a mode and its ratios name; a ratio that the mode does not use must be left alone."""
    from artifact.measure.configuration import Configuration

    if mode not in MODES:
        raise UserError(f"no mode is called {mode!r}; choose one of {', '.join(MODES)}")
    projection = r_p if mode in ("projection", "both") else 1.0
    if mode in ("dense", "projection"):
        return Configuration(r_p=projection)
    if r_kv == 1.0:
        raise UserError(f"--mode {mode} with --r-kv 1 keeps every entry; use --mode dense or projection for that")
    return Configuration(projection, r_kv, "window" if mode == "window" else "snapkv")


def _retrieval(request: dict[str, Any], tokens: int, placements: int) -> dict[str, Any]:
    """Outcome counts by test and configuration."""
    from artifact.measure import quality_cells

    if placements == 0:
        return {}
    multikey = max(4, placements // 4 * 4)
    prompts = [
        quality_cells.prompts_of("passkey", tokens, placements),
        quality_cells.prompts_of("multikey", tokens, multikey),
    ]
    counts: dict[str, Any] = {}
    for row in quality_cells.answered(request | {"prompts": prompts, "tuning": False}):
        if "kind" in row:
            outcomes = counts.setdefault(row["test"], {}).setdefault(row["label"], {})
            outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    return counts


def _card(found: dict[str, Any]) -> None:
    label, change = found["configuration"]["label"], found["increase"]
    click.echo(
        f"{label}: reads {found['counted_r_p']:.1%} of the projections, {found['counted_r_kv']:.1%} of the cache"
    )
    click.echo(
        f"perplexity {found['ppl']:.3f}, dense {found['dense_ppl']:.3f}: {change['point']:+.2%} "
        f"[{change['low']:+.2%}, {change['high']:+.2%}] over {change['windows']} windows"
    )
    for test, arms in found["retrieval"].items():
        for arm, outcomes in arms.items():
            total = sum(outcomes.values())
            others = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()) if name != "right")
            click.echo(f"{test}, {arm}: {outcomes.get('right', 0)} of {total} right{f', {others}' if others else ''}")
    long = found.get("longbench", {})
    for arm, score in long.get("score", {}).items():
        click.echo(f"LongBench {long['task']}, {arm}: {100 * score:.1f} over {long['records']} records")
    click.echo(found["text"])
