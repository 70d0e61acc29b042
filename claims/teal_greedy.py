"""Greedy thresholds against uniform ones at equal effective sparsity (TEAL, which crossover's projection branch uses).

TEAL's block-wise greedy allocation spreads a layer's sparsity over its projections where the layer's output suffers
least; the paper's branch targets a uniform 50% in all seven. Measured here: both at the same effective keep ratio, the
weights weighed by their real shapes, on the same windows; block errors on calibration text alone.

    python claims/teal_greedy.py [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, NotRun, Predicate, find, not_run, run_as_script
from artifact.profiles import Profile
from artifact.stats import Interval, Region, exact_interval

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "teal_greedy"
KEEPS = (0.5,)  # the paper's target; more ratios cost half a minute each
EVERYWHERE = frozenset(("embedded", "paper"))

CLAIM = Claim(
    name=NAME,
    title="Greedy thresholds lose no more perplexity than uniform ones at equal effective sparsity",
    paper="crossover",
    place="section 4.1, Appendix A (thresholds of TEAL)",
    needs="a model with trained weights and its tokenizer; 3 GB of memory",
    minutes={"embedded": "2 (quick: 1)", "gpu": "not run: synthetic weights have no perplexity", "paper": "20"},
    tables=(),
    predicates=(
        Predicate(
            "equal effective sparsity",
            "largest distance between the counted keep ratios of both allocations, shares of projection bytes",
            "TEAL, Algorithm 1",
            Region(0.0, 0.02, "two points: what thresholds of other text are off by; more would be another ratio"),
            EVERYWHERE,
        ),
        Predicate(
            "greedy is no worse",
            "perplexity of greedy over uniform thresholds minus 1, same windows, where it gains least",
            "TEAL, Algorithm 1",
            Region(None, 0.0, "chosen by block error, the same bytes should not cost more perplexity"),
            frozenset(("paper",)),
            "greedy below uniform at every sparsity (TEAL)",
        ),
    ),
)


def measure(run: Run) -> None:
    """Allocate and score both kinds of thresholds on the shared windows."""
    from artifact.measure.cells import is_name
    from artifact.measure.greedy_cells import score_both
    from artifact.measure.quality_plan import protocol

    if is_name(run.profile.model):
        raise NotRun("synthetic weights have no perplexity; run `artifact verify teal_greedy --profile embedded`")
    score_both(run, NAME, protocol(run), KEEPS)


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Compare both allocations at every keep ratio, windows paired."""
    from artifact.measure import quality

    equal, no_worse = CLAIM.predicates
    windows = [row for row in rows if row.get("kind") == "window"]
    if not windows:
        return [not_run(predicate, "no window was scored") for predicate in CLAIM.predicates]
    losses = quality.losses(windows)
    keeps = sorted({row["r_p"] for row in windows}, reverse=True)
    counted = {keep: _counted(windows, keep) for keep in keeps}
    distance = max(abs(pair["uniform"] - pair["greedy"]) for pair in counted.values())
    changes = {keep: quality.increase(losses, f"greedy{100 * keep:g}", f"uniform{100 * keep:g}") for keep in keeps}
    worst = max(keeps, key=lambda keep: changes[keep].high)
    extra: dict[str, float | str] = {
        f"{kind} reads at {keep:.0%}": counted[keep][kind] for keep in keeps for kind in counted[keep]
    }
    detail: dict[str, float | str] = {f"greedy over uniform at {keep:.0%}": changes[keep].point for keep in keeps}
    detail |= {f"PPL {label}": quality.perplexity(losses, label).point for label in losses}
    change: Interval = changes[worst]
    return [
        find(equal, exact_interval(distance), profile, "", extra),
        find(no_worse, change, profile, f"at {worst:.0%} keep", detail),
    ]


def _counted(windows: list[dict[str, Any]], keep: float) -> dict[str, float]:
    """Mean counted share of projection bytes of both kinds at one requested ratio."""
    found = {}
    for kind in ("uniform", "greedy"):
        own = [row["counted_r_p"] for row in windows if row["label"] == f"{kind}{100 * keep:g}"]
        found[kind] = sum(own) / len(own)
    return found


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
