"""LoRA fine-tuning under frozen thresholds lowers perplexity; routed, it still decodes faster (sats, Tables 3, 4, 7).

The paper: fine-tuning lowers the perplexity of CATS and SATS; the fused sparse LoRA kernels leave the routed fine-tuned
model a throughput gain over dense inference, smaller than without adapter. Measured here: an adapter on gate, up and
down, trained with `peft` on the calibration split, forward pass sparse; perplexity of both methods before and after on
the same windows; interleaved steps with the update fused, apart and routed, on a GPU with weights in float32 (Table 7)
and bfloat16. Adapters made by `artifact finetune` are
used where they lie; otherwise a short training is part of the claim.

    python claims/sats_finetuned.py [--quick]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, Predicate, find, not_run, run_as_script
from artifact.judge import masked_speed
from artifact.profiles import NAMES, Profile
from artifact.stats import Region, block_interval, over_dense
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "sats_finetuned"
PAPER = figures("sats")
SPARSITY, OPERATING = PAPER["matched.high"].value / 100, PAPER["routed.mid"].value / 100
# Of the training that is part of the claim where no adapter lies ready: twelve steps of 256 tokens were seen to take
# the perplexity of SATS from 18.1 to 15.4 on the embedded model.
TRAINING_STEPS, QUICK_TRAINING_STEPS = 16, 6
TRAINING_MINUTES = 1.0  # at most, for either method
BLOCKS, QUICK_BLOCKS = 7, 3
STEPS, QUICK_STEPS = 14, 8
CONTEXTS = {"embedded": 256, "gpu": 1024, "paper": 1024}
SHAPES = ("Llama-3.1-8B", "Qwen3-8B")
TRAINED, EVERYWHERE = frozenset(("embedded", "paper")), frozenset(NAMES)
METHODS = ("cats", "sats")

CLAIM = Claim(
    name=NAME,
    title="Fine-tuned under frozen thresholds, sparse models lose less and routed ones stay faster than dense",
    paper="sats",
    place="Tables 3, 4 and 7",
    needs="a model with trained weights and its tokenizer (speed alone: a CUDA GPU); 5 GB of memory",
    minutes={"embedded": "3 (quick: 1)", "gpu": "6 (quick: 2.5)", "paper": "80"},
    tables=("sats_table3", "sats_table4", "sats_table7"),
    predicates=(
        *(
            Predicate(
                f"fine-tuning lowers perplexity of {method.upper()}",
                "perplexity after over before minus 1 at 50% sparsity, windows paired",
                "Tables 2 and 4",
                Region(None, 0.0, "lower levels of perplexity in general, as printed for language modelling"),
                TRAINED,
                "lower perplexity after fine-tuning",
            )
            for method in METHODS
        ),
        Predicate(
            "routed and adapted is faster than dense",
            "time of a dense step over that of a routed, adapted one at half of the tokens",
            "Table 7",
            Region(1.0, None, "a clear throughput advantage over dense inference must at least be one", "x"),
            EVERYWHERE,
            "less pronounced than training-free, still an advantage",
        ),
        Predicate(
            "fused beats separate products",
            "time of a static, adapted step with separate low-rank products over the fused one",
            "fine-tuning methods, LoRA-aware kernels",
            Region(1.0, None, "the fused kernels reduce launches and small products, so they must not cost time", "x"),
            EVERYWHERE,
            "the naive form introduced substantial extra overhead",
        ),
    ),
)


def measure(run: Run) -> None:
    """Find or train both adapters, score before and after, time the adapted arms."""
    from artifact.measure import multiple_choice
    from artifact.measure.finetune import Recipe
    from artifact.measure.finetune_cells import adapter_cell
    from artifact.measure.masked_cells import score_cell
    from artifact.measure.masked_plan import RANDOM, Arm, sizes
    from artifact.measure.masked_timing import settings, timing_cell

    plan, trained = sizes(run.profile, run.quick), run.profile.name != "gpu"
    adapters = {"sats": RANDOM}
    if trained:
        training = QUICK_TRAINING_STEPS if run.quick else TRAINING_STEPS
        recipe = Recipe(steps=training, sequence=128, batch=2, warmup=2, minutes=TRAINING_MINUTES)
        if run.profile.name == "paper":
            recipe = replace(recipe, minutes=10.0, steps=400, sequence=1024)
        cells = [adapter_cell(run, NAME, plan, Arm(method, SPARSITY), recipe) for method in METHODS]
        adapters = {row["label"][:4]: row["adapter"] for row in run.measure(cells)}
        arms = [Arm(), *(Arm(method, SPARSITY) for method in METHODS)]
        arms += [Arm(method, SPARSITY, adapter=adapters[method]) for method in METHODS]
        run.measure([score_cell(run, NAME, "arms", plan, arms)])
        if multiple_choice.installed():
            run.measure([multiple_choice.choice_cell(run, NAME, plan, arms)])
    own, table = adapters["sats"], "scores" if trained else "random"
    arms = [Arm(), Arm("sats", SPARSITY), Arm("sats", SPARSITY, adapter=own)]
    arms += [Arm("sats", SPARSITY, adapter=own, fused=False), Arm("sats", SPARSITY, OPERATING, table, 1, own)]
    blocks, steps = (QUICK_BLOCKS, QUICK_STEPS) if run.quick else (BLOCKS, STEPS)
    context = CONTEXTS[run.profile.name]
    wanted = settings(run, NAME, arms, context + steps, ("",) if trained else SHAPES)
    for block in range(blocks):
        for setting in wanted:
            run.measure([timing_cell(run, NAME, plan, arms, context, steps, block, setting)])


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge perplexity where windows were scored, and speed per block."""
    windows = [row for row in rows if row.get("kind") == "window"]
    adapters = [row for row in rows if row.get("kind") == "adapter"]
    timed = [row for row in rows if row.get("kind") == "timing"]
    return [*_quality(windows, adapters, profile), *_speed(timed, masked_speed.no_room(rows), profile)]


def _quality(windows: list[dict[str, Any]], adapters: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    from artifact.measure import quality

    predicates = dict(zip(METHODS, CLAIM.predicates, strict=False))
    if not windows:
        return [not_run(one, "synthetic weights have no perplexity") for one in predicates.values()]
    losses = quality.losses(windows)
    found = []
    for method, predicate in predicates.items():
        label = f"{method}{100 * SPARSITY:g}"
        own = next(row for row in adapters if row["label"] == label)
        shown: dict[str, float | str] = {
            "PPL dense": quality.perplexity(losses, "dense").point,
            "PPL before": quality.perplexity(losses, label).point,
            "PPL after": quality.perplexity(losses, f"{label}-lora").point,
            "training steps": float(own["steps_done"]),
            "training tokens": float(own["tokens_seen"]),
        }
        how = "made beforehand" if own["made_before"] else "trained in this run"
        change = quality.increase(losses, f"{label}-lora", label)
        found.append(find(predicate, change, profile, f"adapter {how}", shown))
    return found


def _speed(timed: list[dict[str, Any]], no_room: dict[str, float | str], profile: Profile) -> list[Finding]:
    """Ratios per block from trimmed means of paired steps; of all models and formats the one that gains least is
    judged, and all are printed.
    """
    faster, fused = CLAIM.predicates[len(METHODS) :]
    if not timed:
        why = "; ".join(map(str, no_room.values())) or "no step was timed"
        return [not_run(one, why) for one in (faster, fused)]
    gains, saved, extra = {}, {}, dict(no_room)
    for setting, blocks in masked_speed.by_setting(timed).items():
        ratios = [speed_ratios(block) for block in blocks]
        gains[setting] = block_interval([1 / ratio["routed"] for ratio in ratios], unit="x")
        saved[setting] = block_interval([ratio["apart"] / ratio["fused"] for ratio in ratios], unit="x")
        for name in ("routed", "static", "fused", "apart"):
            extra[f"dense over {name}, {setting}"] = median(1 / ratio[name] for ratio in ratios)
    least, closest = min(gains, key=lambda one: gains[one].low), min(saved, key=lambda one: saved[one].low)
    return [
        find(faster, gains[least], profile, least, extra),
        find(fused, saved[closest], profile, closest),
    ]


def kind_of(row: dict[str, Any]) -> str:
    """The part an arm plays in this claim."""
    if row["method"] == "dense":
        return "dense"
    if row["share"] < 1:
        return "routed"
    if not row["adapter"]:
        return "static"
    return "fused" if row["fused"] else "apart"


def speed_ratios(block: list[dict[str, Any]]) -> dict[str, float]:
    """Step time of every arm over that of dense."""
    return over_dense({kind_of(row): row["ms"] for row in block})


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
