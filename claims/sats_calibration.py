"""One error budget sets the thresholds of all layers, and it tracks the quality of the model (sats, equations 6-10).

The paper: per layer the largest threshold whose local error stays within a budget; the budget whose realised sparsity
is closest to the target; local distortion tracks end-to-end performance. Measured here: thresholds from streamed
calibration; sparsity and errors counted again in a pass of their own, thresholded outputs formed in full; perplexity at
a row of budgets on fixed windows, rank correlation with an interval over windows.

    python claims/sats_calibration.py [--quick]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, NotRun, Predicate, find, not_run, run_as_script
from artifact.profiles import Profile
from artifact.stats import Interval, Region, exact_interval

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "sats_calibration"
SWEEP, QUICK_SWEEP = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7), (0.1, 0.3, 0.5, 0.7)
EVERYWHERE = frozenset(("embedded", "paper"))
DRAWS = 2000

CLAIM = Claim(
    name=NAME,
    title="One error budget sets SATS's thresholds and tracks the quality of the model",
    paper="sats",
    place="equations 6 to 10, Figure 1",
    needs="a model with trained weights and its tokenizer; 3 GB of memory",
    minutes={"embedded": "2 (quick: 0.7)", "gpu": "not run: synthetic weights have no quality", "paper": "25"},
    tables=(),
    predicates=(
        Predicate(
            "realised sparsity",
            "largest distance between realised and target sparsity (30%, 50%), counted again over all layers",
            "equations 9 and 10",
            Region(0.0, 0.005, "half a point: what a matched operating point may differ by to be called matched"),
            EVERYWHERE,
            "identical sparsity levels",
        ),
        Predicate(
            "every layer within the budget",
            "largest local error of any layer over its budget, counted again",
            "equation 7",
            Region(None, 1.001, "at most the budget; one in a thousand is float32 rounding of another order of sums"),
            EVERYWHERE,
        ),
        Predicate(
            "local error tracks perplexity",
            "Spearman rank correlation of budget and perplexity over a row of budgets",
            "Figure 1 (b)",
            Region(0.9, 1.0, "consistently: of six budgets at most one pair of neighbours in the wrong order"),
            EVERYWHERE,
            "tracks end-to-end model performance consistently",
        ),
    ),
)


def measure(run: Run) -> None:
    """Count the calibration again, then score the windows at every budget of the sweep."""
    from artifact.measure.masked_cells import recount_cell, score_cell
    from artifact.measure.masked_plan import TARGETS, Arm, sizes

    if run.profile.name == "gpu":
        raise NotRun(f"synthetic weights have no perplexity; run `artifact verify {NAME} --profile embedded`")
    plan = sizes(run.profile, run.quick)
    sweep = [Arm("sats", sparsity) for sparsity in (QUICK_SWEEP if run.quick else SWEEP)]
    run.measure([recount_cell(run, NAME, plan, TARGETS), score_cell(run, NAME, "sweep", plan, [Arm(), *sweep])])


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge the recount and the rank correlation."""
    realised, within, tracks = CLAIM.predicates
    counted = [row for row in rows if row.get("kind") == "recount"]
    if not counted:
        return [not_run(predicate, "nothing was counted again") for predicate in CLAIM.predicates]
    distances = {row["target"]: abs(_mean(row["layer_sparsity"]) - row["target"]) for row in counted}
    ratios = {row["target"]: max(row["layer_errors"]) / row["budget"] for row in counted}
    shown: dict[str, float | str] = {}
    for row in counted:
        at = f"{row['target']:.0%}"
        shown[f"held-out sparsity at {at}"] = _mean(row["held_out_sparsity"])
        shown[f"held-out error over budget at {at}"] = max(row["held_out_errors"]) / row["budget"]
        shown[f"layers at {at}"] = f"{min(row['layer_sparsity']):.0%} to {max(row['layer_sparsity']):.0%}"
    return [
        find(realised, exact_interval(max(distances.values())), profile, "", shown),
        find(within, exact_interval(max(ratios.values())), profile, f"budgets {_budgets(counted)}"),
        _tracking(tracks, [row for row in rows if row.get("kind") == "window"], profile),
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _budgets(counted: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['budget']:.3f} at {row['target']:.0%}" for row in counted)


def _tracking(predicate: Predicate, windows: list[dict[str, Any]], profile: Profile) -> Finding:
    from artifact.measure import quality

    if not windows:
        return not_run(predicate, "no window was scored")
    losses = quality.losses(windows)
    budgets = {row["label"]: row["budget"] for row in windows if row["budget"] is not None}
    labels = sorted(budgets, key=lambda label: budgets[label])
    means = {label: quality.window_means(losses, label) for label in labels}
    interval = rank_correlation([budgets[label] for label in labels], [means[label] for label in labels])
    extra: dict[str, float | str] = {
        f"PPL at budget {budgets[label]:.3f}": quality.perplexity(losses, label).point for label in labels
    }
    return find(predicate, interval, profile, f"{len(labels)} budgets", {**extra, "PPL dense": _dense(losses)})


def _dense(losses: dict[str, dict[int, list[float]]]) -> float:
    from artifact.measure import quality

    return quality.perplexity(losses, "dense").point


def rank_correlation(budgets: list[float], window_means: list[list[float]]) -> Interval:
    """Spearman correlation of budget and mean loss; the interval resamples windows, the same for every budget."""
    import numpy as np
    from scipy.stats import spearmanr

    table = np.array(window_means)  # (budgets, windows)
    rng = np.random.default_rng(0)

    def correlation(columns: Any) -> float:
        return float(spearmanr(budgets, table[:, columns].mean(1)).statistic)

    draws = [correlation(rng.integers(table.shape[1], size=table.shape[1])) for _ in range(DRAWS)]
    low, high = np.quantile(draws, (0.025, 0.975))
    method = f"bootstrap 95% over windows, {DRAWS} draws"
    found = Interval(correlation(np.arange(table.shape[1])), float(low), float(high), table.shape[1], method)
    return replace(found, low=min(found.low, found.point), high=max(found.high, found.point))


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
