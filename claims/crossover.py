"""The two branches cross where the byte account plus kernel costs says (crossover, section 4.3, Table 2, Figure 4).

The paper finds every measured crossing within 4.1K tokens of its cost-aware prediction on A100, 5.5% of the 74.3K
byte crossover it was measured around. Measured here: a dense prefill of real text, forked per mode; 50 decode steps
with all modes and contexts of a group interleaved step by step, in fresh processes. A block is one process: a sweep,
which gives the kernel costs and the prediction, and rows at other contexts, which give the measured crossing; the
difference is judged over blocks.

    python claims/crossover.py [--quick] [--profile embedded|gpu|paper] [--model PATH]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, Predicate, run_as_script
from artifact.profiles import NAMES, Profile
from artifact.stats import Region

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "crossover"
PAIRS = ((0.5, 0.3), (0.6, 0.3), (0.6, 0.2))  # (r_p, r_kv); the first is the paper's nominal pair
REGION_SHARE = 0.055  # 4.1K / 74.3K
BOUND_SLACK = 1.05
BLOCKS = 7  # docs/judge-rates.md: fewer blocks err too often, and so does looking again after every further one
STEPS, QUICK_STEPS = 50, 16
QUICK_PAIRS, QUICK_BLOCKS = PAIRS[:1], 4  # a quick run relies on a quiet machine; the regions are the same
EVERYWHERE = frozenset(NAMES)


def crossing_predicate(r_p: float, r_kv: float) -> Predicate:
    """The main predicate for one pair; its region in tokens is set when n* of the model is known."""
    return Predicate(
        name=f"crossing at {r_p:.0%} / {r_kv:.0%}",
        statement=f"measured crossing at r_p {r_p}, r_kv {r_kv} lies within 5.5% of n* of its cost-aware prediction",
        place="section 4.3, Table 2",
        region=Region(None, None, "5.5% of n*: the paper's 4.1K of 74.3K on A100", "tokens"),
        asserted_in=EVERYWHERE,
        paper_value="within 4.1K tokens (A100), 0.6K (RTX A6000)",
    )


ORDER = Predicate(
    "order of crossings",
    "crossings keep the order of their byte crossovers (smallest distance between neighbours, tokens)",
    "section 4.3",
    Region(0.0, None, "order survives any machine: a pair with larger n* crosses later", "tokens"),
    EVERYWHERE,
    "kept on both models and GPUs",
)
SHORT = Predicate(
    "projection leads at the shortest context",
    "KV step time over projection step time at the shortest context, nominal pair",
    "section 4.2, Figure 3",
    Region(1.0, None, "below n* the projection branch removes more bytes", "x"),
    EVERYWHERE,
    "projection leads at 2K",
)
LONG = Predicate(
    "the predicted branch leads at the longest context",
    "step time of the other branch over that of the one predicted to lead at the longest context, nominal pair",
    "section 4.2, Figure 3",
    Region(
        1.0, None, "KV selection leads past the predicted crossing; projection where the window ends before it", "x"
    ),
    EVERYWHERE,
    "selection leads at 64K and 128K (A100)",
)


def bound_predicate(mode: str) -> Predicate:
    """A branch's gain over its byte bound, at the context where it comes closest."""
    return Predicate(
        f"{mode} within its byte bound",
        f"largest ratio of the {mode} mode's gain over dense to its byte bound",
        "section 3.3, section 4.4",
        Region(
            None, BOUND_SLACK, "a gain above the bound means a wasteful dense baseline; 5% for noise of a median", "x"
        ),
        EVERYWHERE,
        "selection within 1 to 6% below its bound",
    )


BOUNDED = ("projection", "kv", "both")
CLAIM = Claim(
    name=NAME,
    title="The latency crossing of the two branches lies where the byte account plus kernel costs predicts",
    paper="crossover",
    place="section 4.3, Table 2, Figure 4",
    needs="a model; 6 GB of memory (embedded) or a CUDA GPU (gpu)",
    minutes={"embedded": "6 (quick: 2)", "gpu": "8 per model", "paper": "15"},
    tables=("table2",),
    predicates=(
        *(crossing_predicate(*pair) for pair in PAIRS),
        ORDER,
        SHORT,
        LONG,
        *(bound_predicate(mode) for mode in BOUNDED),
    ),
)


def measure(run: Run) -> None:
    """Measure a pilot and blocks of one sweep and one crossing cell; how many is fixed before the first is seen."""
    from artifact.measure.crossing_cells import Plan, measure_blocks

    if run.quick:
        measure_blocks(run, Plan(NAME, QUICK_PAIRS, QUICK_STEPS), QUICK_BLOCKS)
    else:
        measure_blocks(run, Plan(NAME, PAIRS, STEPS), BLOCKS)


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge every predicate from the stored samples alone."""
    from artifact.judge.crossing_judge import Judgement

    judgement = Judgement(rows, profile)
    findings = [judgement.crossing(crossing_predicate(*pair), *pair, REGION_SHARE) for pair in PAIRS]
    findings.append(judgement.order(ORDER, PAIRS))
    findings.append(judgement.projection_leads_at_first(SHORT, PAIRS[0]))
    findings.append(judgement.predicted_leads_at_last(LONG, PAIRS[0], REGION_SHARE))
    findings += [judgement.within_bound(bound_predicate(mode), mode) for mode in BOUNDED]
    return findings


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
