"""At equal quality the byte crossover lies earlier than the nominal one (crossover, section 5.2, Figure 6).

The paper: perplexity against the keep ratio of each branch, interpolated; equating byte savings at equal perplexity
increase moves the crossover from 74.3K to 35.7K, 48.1K and 57.8K for budgets of 0.2, 0.5 and 1.0. Measured here: the
same sweep on fixed windows; budgets as shares of dense perplexity; intervals over windows. A keep ratio beyond the
sweep is never extrapolated: where a branch stays within the budget, its smallest measured ratio is taken.

    python claims/quality_matched_crossover.py [--quick]
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.account import Setting, n_star
from artifact.claim import Claim, Finding, NotRun, Predicate, find, not_run, run_as_script
from artifact.judge import matched
from artifact.profiles import Profile
from artifact.shapes import Shape
from artifact.stats import Interval, Region
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "quality_matched_crossover"
PAPER = figures("crossover")
DENSE_PPL = PAPER["ppl.dense.32k"].value
SIZES = ("0.2", "0.5", "1.0")
BUDGETS = {size: PAPER[f"budget.{size}"].value / DENSE_PPL for size in SIZES}
NOMINAL = Setting(r_p=0.5, r_kv=0.3)
EVERYWHERE = frozenset(("embedded", "paper"))


def predicate(size: str) -> Predicate:
    """The crossover at one budget, over the nominal one."""
    return Predicate(
        f"earlier at {BUDGETS[size]:.1%}",
        f"quality-matched n* over nominal n* at a perplexity budget of {BUDGETS[size]:.1%} of dense",
        "section 5.2, Figure 6",
        Region(None, 1.0, "earlier than the nominal crossover, nothing more", "of nominal n*"),
        EVERYWHERE,
        f"{PAPER[f'matched.{size}'].printed}K of {PAPER['matched.nominal'].printed}K",
    )


SEPARATE = Predicate(
    "projection keeps separate",
    "extra nats from one projection keep to the next lower one (70, 60, 50%), windows paired, the least resolved step",
    "section 5.2",
    Region(
        1e-6,
        None,
        "each step down costs something, a difference of exactly nothing is a ratio that was ignored",
        "nats",
    ),
    EVERYWHERE,
    "intervals over eight windows separate 70, 60 and 50%",
)

CLAIM = Claim(
    name=NAME,
    title="At equal perplexity the branches cross earlier than at nominal keep ratios",
    paper="crossover",
    place="section 5.2, Figure 6",
    needs="a model with trained weights and its tokenizer; 3 GB of memory",
    minutes={"embedded": "2 (quick: 0.5)", "gpu": "not run: synthetic weights have no perplexity", "paper": "20"},
    tables=(),
    predicates=(*(predicate(size) for size in SIZES), SEPARATE),
)


def measure(run: Run) -> None:
    """Score dense and every single branch of the sweep on the shared windows."""
    from artifact.engine.checkpoints import open_checkpoint
    from artifact.measure.cells import is_name
    from artifact.measure.quality_cells import score_windows
    from artifact.measure.quality_plan import protocol, singles

    if is_name(run.profile.model):
        raise NotRun(f"synthetic weights have no perplexity; run `artifact verify {NAME} --profile embedded`")
    run.record(NAME, "shape", [{"kind": "shape", "shape": asdict(open_checkpoint(run.profile.model).shape)}])
    score_windows(run, NAME, protocol(run), singles())


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Interpolate both sweeps and judge the matched crossover at every budget, with intervals over windows."""
    shape = Shape(**next(row["shape"] for row in rows if row.get("kind") == "shape"))
    sweep = matched.Sweep.of([row for row in rows if row.get("kind") == "window"])
    findings = [_at_budget(predicate(size), BUDGETS[size], sweep, shape, profile) for size in SIZES]
    return [*findings, find(SEPARATE, sweep.least_step((0.7, 0.6, 0.5)), profile)]


def _at_budget(one: Predicate, budget: float, sweep: matched.Sweep, shape: Shape, profile: Profile) -> Finding:
    nominal = n_star(shape, NOMINAL)

    def ratio(r_p: float, r_kv: float) -> float:
        if r_kv >= 1.0:
            return float("inf")  # the selection saves nothing within this budget: the branches never cross
        return n_star(shape, Setting(r_p=r_p, r_kv=r_kv)) / nominal if r_p < 1 else 0.0

    r_p, r_kv = sweep.keeps(budget)
    point, low, high = sweep.interval(budget, ratio)
    if point == float("inf"):
        return not_run(one, f"no measured KV keep ratio stays within {budget:.1%}")
    interval = Interval(point, low, high, sweep.windows, "bootstrap 95% over windows", "of nominal n*")
    extra: dict[str, float | str] = {
        "r_p": round(r_p, 3),
        "r_kv": round(r_kv, 3),
        "n_star_tokens": point * nominal,
        "nominal_tokens": nominal,
    }
    return find(one, interval, profile, f"r_p {r_p:.0%} against r_kv {r_kv:.0%}", extra)


def figure_points(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points of Figure 6: branch, keep ratio, perplexity increase with its interval, from stored rows."""
    return matched.Sweep.of([row for row in rows if row.get("kind") == "window"]).points()


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
