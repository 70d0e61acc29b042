"""The attention path of the dense baseline decides the reported gain of a KV method (crossover, section 4.4, Figure 5).

The same 30% window at the longest context is timed against dense decoding with three attention paths: masked over the
whole allocation with repeated KV heads, torch's fused kernel, and split-K (ours; on a GPU flash-attn's as well). The
paper reports 6.92x, 2.82x and 1.29x at 128K where the byte bound is 1.60x: the first two gains come from the baseline,
not from the method.

    python claims/baseline_sensitivity.py [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, Predicate, find, not_run, run_as_script
from artifact.profiles import NAMES, Profile
from artifact.stats import Region, block_interval

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "baseline_sensitivity"
R_KV = 0.3
PATHS = ("masked", "fused", "splitk")
FLASH = "flash_attn"  # the paper's own kernel, measured beside ours where it is installed
BLOCKS, QUICK_BLOCKS, STEPS, QUICK_STEPS = 7, 3, 8, 6
EVERYWHERE = frozenset(NAMES)
PLACE = "section 4.4, Figure 5"

ORDER = Predicate(
    "gain order",
    "the gain over masked exceeds that over fused, which exceeds that over split-K (smaller of the two ratios)",
    PLACE,
    Region(1.0, None, "each path wastes more than the next, whatever the machine", "x"),
    EVERYWHERE,
    "6.92x > 2.82x > 1.29x",
)
SPREAD = Predicate(
    "spread of gains",
    "largest over smallest gain of the same window",
    PLACE,
    Region(
        2.0,
        None,
        "the paper's spread is 5.4x at 128K; a short window leaves less cache to waste, half of it must remain",
        "x",
    ),
    EVERYWHERE,
    "6.92x / 1.29x = 5.4x",
)
SPLITK_BOUND = Predicate(
    "split-K gain within its bound",
    "gain over the split-K baseline divided by the byte bound",
    PLACE,
    Region(None, 1.05, "a baseline that wastes nothing leaves no gain above the bound; 5% for noise of a median", "x"),
    EVERYWHERE,
    "1.29x of 1.60x",
)
MASKED_BOUND = Predicate(
    "masked gain above the bound",
    "gain over the masked baseline divided by the byte bound",
    PLACE,
    Region(1.0, None, "a gain above the bound shows wasted execution in the baseline", "x"),
    EVERYWHERE,
    "6.92x of 1.60x",
)

CLAIM = Claim(
    name=NAME,
    title="The same KV window gains several times more over a wasteful dense baseline than over split-K attention",
    paper="crossover",
    place=PLACE,
    needs="a model; 4 GB of memory (embedded) or a CUDA GPU (gpu)",
    minutes={"embedded": "1.5 (quick: 0.5)", "gpu": "3", "paper": "5"},
    tables=(),
    predicates=(ORDER, SPREAD, SPLITK_BOUND, MASKED_BOUND),
)


def measure(run: Run) -> None:
    """One cell per block: dense decoding by each path and the window, interleaved at the longest context."""
    from artifact.engine.attention_paths import paths_here
    from artifact.measure.cells import Row, member, request
    from artifact.measure.crossing_cells import TASK, fitting_context
    from artifact.records import Cell

    steps = QUICK_STEPS if run.quick else STEPS
    paths = paths_here(run.profile.device)

    def group(context: int) -> list[Row]:
        return [*(member(context, path=path) for path in paths), member(context, r_kv=R_KV, method="window")]

    fit = fitting_context(run.profile, steps, lambda n: [group(n)])
    params = request(run.profile, [group(fit.tokens)], steps, fit.tokens, fit.note)
    run.measure(
        [Cell(NAME, f"longest-{block}", TASK, params, block) for block in range(QUICK_BLOCKS if run.quick else BLOCKS)]
    )


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge the gains of every block; the share of read bandwidth that each path reached stands beside them."""
    from artifact.judge.baselines import gains_by_block, path_shares

    paths = [path for path in (*PATHS, FLASH) if path != FLASH or any(row["path"] == FLASH for row in rows)]
    gains, bounds = gains_by_block(rows, paths)
    if not gains:
        return [not_run(predicate, "no block was measured") for predicate in CLAIM.predicates]
    shares = path_shares(rows, paths)
    note = "" if FLASH in paths else "flash-attn is not installed here: split-K is our kernel alone"

    def finding(predicate: Predicate, values: list[float]) -> Finding:
        return find(predicate, block_interval(values, unit="x"), profile, note, shares)

    return [
        finding(ORDER, [min(g["masked"] / g["fused"], g["fused"] / g["splitk"]) for g in gains]),
        finding(SPREAD, [max(g[p] for p in PATHS) / min(g[p] for p in PATHS) for g in gains]),
        finding(SPLITK_BOUND, [g["splitk"] / limit for g, limit in zip(gains, bounds, strict=True)]),
        finding(MASKED_BOUND, [g["masked"] / limit for g, limit in zip(gains, bounds, strict=True)]),
    ]


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
