"""Speedups of both branches and of their composition follow their byte bounds over context (crossover, section 4.2,
Figure 3).

A fixed saving is worth less as the cache grows, a growing one more, and the two together most. Every mode is timed at
several contexts, all interleaved step by step, and stands beside the byte bound of the keep ratios that the step
itself counted.

    python claims/speedup_bounds.py [--quick]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, Predicate, find, not_run, run_as_script
from artifact.profiles import NAMES, Profile
from artifact.stats import Region, block_interval

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "speedup_bounds"
BLOCKS, QUICK_BLOCKS = 7, 3
EVERYWHERE = frozenset(NAMES)
PLACE = "section 4.2, Figure 3"


def _predicate(name: str, statement: str, region: Region, paper: str) -> Predicate:
    return Predicate(name, statement, PLACE, region, EVERYWHERE, paper)


FALLS = _predicate(
    "projection gain falls",
    "projection gain at the shortest context over that at the longest",
    Region(1.0, None, "the saving is fixed while the step grows", "x"),
    "1.36x at 2K, shrinking with context (A100)",
)
RISES = _predicate(
    "KV gain rises",
    "rise of the KV gain from the shortest to the longest context, in logarithms, over the rise of its byte bound",
    Region(0.5, None, "the saving grows with the cache; half of the bound's rise tells it from a mode that reads all"),
    "1.54x at 128K (A100)",
)
BEST = _predicate(
    "composition fastest at the longest context",
    "faster single branch's step time over the composition's, at the longest context",
    Region(1.0, None, "composition has the highest bound at every length", "x"),
    "fastest from 8K on; 1.91x at 128K (A100)",
)
CONSTANT = _predicate(
    "projection cost nearly constant",
    "spread of the projection's kernel cost over contexts as a share of the dense step at the longest",
    Region(
        None, 0.10, "about 2 ms at every context of the paper: within a tenth of a step it moves no curve's shape", ""
    ),
    "about 2 ms (A100), 1 to 1.5 ms (RTX A6000)",
)
BOUND = _predicate(
    "every gain within its bound",
    "largest ratio of any gain to its byte bound, over modes and contexts",
    Region(None, 1.05, "a gain above the bound means a wasteful dense baseline; 5% for noise of a median", "x"),
    "1 to 10% below",
)
CLAIM = Claim(
    name=NAME,
    title="Measured speedups over context have the shape of their byte bounds",
    paper="crossover",
    place=PLACE,
    needs="a model; 5 GB of memory (embedded) or a CUDA GPU (gpu)",
    minutes={"embedded": "2.5 (quick: 1)", "gpu": "5", "paper": "8"},
    tables=(),
    predicates=(FALLS, RISES, BEST, CONSTANT, BOUND),
)


def measure(run: Run) -> None:
    """One cell per block: four modes at contexts from the shortest to the longest, all interleaved."""
    from artifact.measure.mode_sweep import cells

    run.measure(cells(run, NAME, QUICK_BLOCKS if run.quick else BLOCKS))


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge the shape of the curves block by block; the mean curve stands beside each verdict."""
    from artifact.judge.speedups import blocks_of, curve, threshold_tokens

    blocks = blocks_of([row for row in rows if "ms" in row])
    if not blocks:
        return [not_run(predicate, "no block was measured") for predicate in CLAIM.predicates]
    extra = {**curve(blocks), "composition_fastest_from_tokens": threshold_tokens(blocks)}

    def finding(predicate: Predicate, values: list[float]) -> Finding:
        return find(predicate, block_interval(values, unit=predicate.region.unit), profile, extra=extra)

    ends = [(block[min(block)], block[max(block)]) for block in blocks]
    return [
        finding(FALLS, [short.gain["projection"] / long.gain["projection"] for short, long in ends]),
        finding(RISES, [_rise(short.gain, long.gain) / _rise(short.bound, long.bound) for short, long in ends]),
        finding(BEST, [long.gain["both"] / max(long.gain["projection"], long.gain["kv"]) for _, long in ends]),
        finding(CONSTANT, [_spread([at.cost_p_ms for at in b.values()]) / b[max(b)].dense_ms for b in blocks]),
        finding(BOUND, [max(at.gain[m] / at.bound[m] for at in b.values() for m in at.gain) for b in blocks]),
    ]


def _rise(short: dict[str, float], long: dict[str, float]) -> float:
    return math.log(long["kv"] / short["kv"])


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
