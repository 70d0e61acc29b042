"""SATS against CATS at matched sparsity, in both formats of the weights (sats, Tables 1, 2 and 5).

The paper: at 30% both are broadly competitive; at 50% SATS has the lower perplexity and the higher accuracy on
Llama-3.1-8B and Qwen3-8B. Measured here: perplexity of both at matched sparsity on the same windows, paired; and,
where lm-eval is installed and its data are cached, the same multiple-choice questions of both. At 50% the same
thresholds, calibrated once, are scored again with weights and cache stored in the other of float32 and bfloat16.

That the formats differ little is asserted of the dense arm everywhere, of thresholded ones at the paper's scale: on the
embedded model a channel within rounding of its threshold falls on either side, so that windows of 256 tokens move by
0.03 nats with either sign, and the mean of six is known to 2% only (-0.1%, -2.4 to +2.1; dense -0.03%, -0.15 to +0.10).
Until that was seen one sentence was asserted of all arms; the region of 1% was there before.

On the embedded model CATS is better at 50%, and the reason was looked for. Perplexity on four windows of 512 tokens:
dense 12.0, CATS 15.5, SATS 17.5. The errors are met to the last digit; epsilon 3 instead of 1e-6 gives 17.4. Equal
relative errors ask for 83% sparsity in the first layer and 91% in the last, because their outputs are easily kept to a
relative error; the model does not bear it in the first: with that one layer at its percentile SATS comes to 14.9, with
the last one at its percentile to 17.1, with both and the budget found anew for the others to 14.9. So for all layers
but the first the paper's ordering shows here, too. `sats-inner` is that variant, printed beside. The ordering of
SATS as published is asserted at the paper's scale, and printed with its sign on the embedded model.

    python claims/sats_vs_cats.py [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, NotRun, Predicate, find, left_out, not_run, run_as_script
from artifact.profiles import Profile
from artifact.stats import Region, exact_interval
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "sats_vs_cats"
PAPER = figures("sats")
LEVELS = tuple(PAPER[f"matched.{key}"].value / 100 for key in ("low", "high"))
EVERYWHERE, PAPER_SCALE = frozenset(("embedded", "paper")), frozenset(("paper",))
FORMAT_ARMS = ("dense", *(f"{method}{100 * LEVELS[-1]:g}" for method in ("cats", "sats")))
INSTALL = "`requirements/setup.sh eval` in a checkout, or pip install '.[eval]'"
ACCURACY = (
    f"{PAPER['accuracy.llama.cats50'].printed} to {PAPER['accuracy.llama.sats50'].printed} (Llama-3.1-8B), "
    f"{PAPER['accuracy.qwen.cats50'].printed} to {PAPER['accuracy.qwen.sats50'].printed} (Qwen3-8B)"
)

CLAIM = Claim(
    name=NAME,
    title="At 50% sparsity SATS is better than CATS, at 30% as good",
    paper="sats",
    place="Tables 1, 2 and 5",
    needs="a model with trained weights and its tokenizer; 3 GB of memory",
    minutes={"embedded": "2 (quick: 0.7)", "gpu": "not run: synthetic weights have no perplexity", "paper": "35"},
    tables=("sats_table1", "sats_table2", "sats_table5"),
    predicates=(
        Predicate(
            "sparsity is matched",
            "largest distance between the sparsities that CATS and SATS realise on the scored tokens",
            "Tables 1 and 2",
            Region(0.0, 0.02, "two points: thresholds of other text are off by that much for either method"),
            EVERYWHERE,
            "identical sparsity level",
        ),
        Predicate(
            "lower perplexity at 50%",
            "perplexity of SATS over that of CATS minus 1 at 50% sparsity, windows paired",
            "Table 2",
            Region(None, 0.0, "lower perplexity, as printed for both models and both texts"),
            PAPER_SCALE,
            "lower on RefinedWeb and WikiText-2",
        ),
        Predicate(
            "competitive at 30%",
            "perplexity of SATS over that of CATS minus 1 at 30% sparsity, windows paired",
            "Table 2",
            Region(-0.02, 0.02, "broadly competitive: within two percent either way"),
            PAPER_SCALE,
            "a small cost (Llama-3.1-8B), a gain on WikiText-2 (Qwen3-8B)",
        ),
        Predicate(
            "lower perplexity between the outer layers",
            "the same at 50% with first and last layer at their percentile (ours, not the paper's)",
            "Table 2",
            Region(None, 0.0, "the ordering of the paper, of the layers whose errors the model bears"),
            frozenset(),
        ),
        *(
            Predicate(
                f"formats differ little, {arms}",
                f"perplexity with bfloat16 weights over that with float32 ones minus 1, {which}",
                "Table 5",
                Region(-0.01, 0.01, "minimal: half of the two percent within which two methods count as equal at 30%"),
                where,
                "the difference between these formats is minimal",
            )
            for arms, which, where in (
                ("dense", "dense", EVERYWHERE),
                ("thresholded", "of CATS or SATS at 50%, whichever moves most", PAPER_SCALE),
            )
        ),
        Predicate(
            "higher accuracy at 50%",
            "average multiple-choice accuracy of SATS minus that of CATS",
            "Table 1",
            Region(0.0, None, "higher average accuracy, as printed for both models"),
            PAPER_SCALE,
            ACCURACY,
        ),
    ),
)


def measure(run: Run) -> None:
    """Score dense, CATS and SATS at both levels on the same windows, then at the higher level in the other format."""
    from artifact.measure import multiple_choice
    from artifact.measure.format_cells import format_cell
    from artifact.measure.masked_cells import score_cell
    from artifact.measure.masked_plan import FORMATS, Arm, sizes

    if run.profile.name == "gpu":
        raise NotRun(f"synthetic weights have no perplexity; run `artifact verify {NAME} --profile embedded`")
    arms = [Arm(), *(Arm(method, level) for level in LEVELS for method in ("cats", "sats"))]
    arms.append(Arm("sats-inner", LEVELS[-1]))
    plan = sizes(run.profile, run.quick)
    run.measure([score_cell(run, NAME, "arms", plan, arms)])
    compared = [arm for arm in arms if arm.label in FORMAT_ARMS]
    others = [name for name in FORMATS if name != run.profile.dtype]
    run.measure([format_cell(run, NAME, plan, compared, name) for name in others])
    if multiple_choice.installed():
        run.measure([multiple_choice.choice_cell(run, NAME, plan, arms)])


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Compare both methods at each level, windows paired."""
    from artifact.measure import quality

    matched, at_high, at_low, inner, *_, accuracy = CLAIM.predicates
    windows = [row for row in rows if row.get("kind") == "window"]
    if not windows:
        return [not_run(predicate, "no window was scored") for predicate in CLAIM.predicates]
    losses = quality.losses(windows)
    sparsity = {label: _sparsity(windows, label) for label in losses if label != "dense"}
    low, high = LEVELS
    off = {level: abs(sparsity[f"cats{100 * level:g}"] - sparsity[f"sats{100 * level:g}"]) for level in LEVELS}
    changes = {level: quality.increase(losses, f"sats{100 * level:g}", f"cats{100 * level:g}") for level in LEVELS}
    shown: dict[str, float | str] = {f"sparsity of {label}": value for label, value in sparsity.items()}
    ppl: dict[str, float | str] = {f"PPL {label}": quality.perplexity(losses, label).point for label in losses}
    return [
        find(matched, exact_interval(max(off.values())), profile, "", shown),
        find(at_high, changes[high], profile, "", ppl),
        find(at_low, changes[low], profile),
        find(inner, quality.increase(losses, f"sats-inner{100 * high:g}", f"cats{100 * high:g}"), profile),
        *_formats(rows, profile),
        _accuracy(accuracy, rows, profile),
    ]


def _accuracy(predicate: Predicate, rows: list[dict[str, Any]], profile: Profile) -> Finding:
    """Compare both methods at the higher level on the same questions."""
    from artifact.judge import accuracy

    arms, level = accuracy.arms(rows), f"{100 * LEVELS[-1]:g}"
    if not arms:
        told = [str(row["reason"]) for row in rows if row.get("kind") == "no-choice"]
        return left_out(predicate, told[0] if told else f"lm-eval was not installed; add it with {INSTALL}")
    shown: dict[str, float | str] = {f"accuracy of {label}": accuracy.average(own) for label, own in arms.items()}
    return find(predicate, accuracy.difference(arms[f"sats{level}"], arms[f"cats{level}"]), profile, "", shown)


def _formats(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Compare both formats on the same windows; of the thresholded arms the one that moves most is judged."""
    from artifact.judge import formats
    from artifact.measure.masked_plan import FORMATS

    dense, thresholded = CLAIM.predicates[4:6]
    losses = formats.by_format(rows)
    if missing := [name for name in FORMATS if name not in losses]:
        return [not_run(one, f"no windows were scored in {' and '.join(missing)}") for one in (dense, thresholded)]
    changes = formats.changes(losses)
    most = max(FORMAT_ARMS[1:], key=lambda one: max(abs(changes[one].low), abs(changes[one].high)))
    shown: dict[str, float | str] = {f"change of {one}": change.point for one, change in changes.items()}
    return [
        find(dense, changes[FORMAT_ARMS[0]], profile),
        find(thresholded, changes[most], profile, f"most with {most}, thresholds shared", shown),
    ]


def _sparsity(windows: list[dict[str, Any]], label: str) -> float:
    """Mean over windows of the sparsity that an arm realised."""
    own = [row["counted_sparsity"] for row in windows if row["label"] == label]
    return float(sum(own) / len(own))


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
