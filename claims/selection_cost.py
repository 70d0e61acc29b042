"""The one-time selection is repaid within few generated tokens (crossover, section 4.1).

The paper: scoring and gather of a 32K prompt take 0.24 s once on A100, and the faster steps repay that within 146
tokens at every length from 16K to 128K. Measured here: the same pass on prefixes of one real-text prefill, and steps of
all modes interleaved in the same process; repaid after = one-time ms / (dense ms - KV ms).

    python claims/selection_cost.py [--quick]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, Predicate, find, not_run, run_as_script
from artifact.profiles import NAMES, Profile
from artifact.stats import Interval, Region, block_interval, require_equal_arms
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "selection_cost"
PAPER = figures("crossover")
BLOCKS, QUICK_BLOCKS = 7, 3
SHORTEST = 16384  # where the paper's lengths begin; a model whose window ends before is judged at all of its lengths

CLAIM = Claim(
    name=NAME,
    title="The one-time selection is repaid within few generated tokens",
    paper="crossover",
    place="section 4.1",
    needs="a model; 4 GB of memory (embedded) or a CUDA GPU",
    minutes={"embedded": "1.5 (quick: 1)", "gpu": "3", "paper": "10"},
    tables=(),
    predicates=(
        Predicate(
            "repaid within",
            "generated tokens that repay scoring and gather, at the length where that takes longest",
            "section 4.1",
            Region(None, PAPER["selection.repaid"].value, "the paper's bound at every length it measured", "tokens"),
            frozenset(NAMES),
            f"{PAPER['selection.repaid'].printed} tokens, 16K to 128K (A100)",
        ),
        Predicate(
            "one-time cost at the longest length",
            "scoring and gather, once",
            "section 4.1",
            Region(None, None, "absolute times are judged on the machine they were published for only", "ms"),
            frozenset(),
            f"{PAPER['selection.once.32k'].printed} s at 32K (A100)",
        ),
    ),
)


def measure(run: Run) -> None:
    """One process per block: the steps of all modes and the pass at every length."""
    from artifact.measure.mode_sweep import cells

    run.measure(cells(run, NAME, QUICK_BLOCKS if run.quick else BLOCKS))


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Tokens to repay at every length, per block; the slowest length is judged."""
    from artifact.judge.levels import with_levels

    repaid, once = CLAIM.predicates
    steps = with_levels([row for row in rows if row["kind"] == "step"])
    passes = [row for row in rows if row["kind"] == "selection"]
    lengths = sorted({row["context"] for row in passes})
    if not lengths or not steps:
        return [not_run(repaid, "no length was measured")]
    require_equal_arms({str(n): [row for row in passes if row["context"] == n] for n in lengths})
    intervals = {n: tokens_to_repay(steps, [row for row in passes if row["context"] == n]) for n in lengths}
    judged = [n for n in lengths if n >= SHORTEST] or lengths
    slowest = max(judged, key=lambda n: intervals[n].high if intervals[n].finite else math.inf)
    extra: dict[str, float | str] = {f"tokens at {n}": intervals[n].point for n in lengths}
    costs = block_interval([median(row["once_ms"]) for row in passes if row["context"] == lengths[-1]], unit="ms")
    return [
        find(repaid, intervals[slowest], profile, f"slowest at {slowest} tokens", extra),
        find(once, costs, profile, f"at {lengths[-1]} tokens"),
    ]


def tokens_to_repay(steps: list[dict[str, Any]], passes: list[dict[str, Any]]) -> Interval:
    """One-time ms over the step time saved, per block. A block that saves nothing makes the interval NaN."""
    estimates = []
    for row in passes:
        at = {one["mode"]: one["level_ms"] for one in steps
              if (one["block"], one["context"]) == (row["block"], row["context"])}  # fmt: skip
        saved = at["dense"] - at["kv"]
        estimates.append(median(row["once_ms"]) / saved if saved > 0 else math.nan)
    return block_interval(estimates, unit="tokens")


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
