"""Fewer bits per weight move the crossover closer, and a fixed KV budget has a crossover of its own (crossover, section
3.3 and 6).

The paper: the threshold scales with s_w / s_kv, so that 4-bit weights with a 16-bit cache move it four times closer;
under a budget of b tokens n* = b + P (1 - r_P) / (2 kv_heads head_dim). Measured here: decoding with weights in 8 bits
(one scale per output) and 4 bits (one per output and 64 inputs, 4.5 bits in all), dense and thresholded, on the cache
as it is, and a selection of a fixed number of tokens; for each the crossing of both branches' times, predicted from
other contexts of the same process.

    python claims/precision.py [--quick]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.account import Setting, n_star
from artifact.claim import Claim, Finding, NotRun, Predicate, find, left_out, not_run, run_as_script
from artifact.judge.levels import with_levels
from artifact.judge.precision import Crossing, Variant, crossing
from artifact.profiles import Profile
from artifact.shapes import Shape
from artifact.stats import Region, block_interval
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "precision"
PAPER = figures("crossover")
R_P, R_KV = 0.5, 0.3
BLOCKS, QUICK_BLOCKS = 7, 3
STEPS = 6
LONGEST = 7936  # the prefill that the crossing claim makes
BUDGET_TOKENS = 1024
# Each with the two contexts of its sweep, which enclose its byte crossover on the embedded model.
VARIANTS = (
    (Variant("int8", bits=8), (512, 6144)),
    (Variant("int4", bits=4), (512, 6144)),
    (Variant("budget", budget_tokens=BUDGET_TOKENS), (2048, LONGEST)),
)
QUANTISED = ("int8", "int4")
TRAINED = frozenset(("embedded",))

CLOSER = Predicate(
    "fewer bits cross earlier",
    "largest measured crossing of 8- and 4-bit weights over the byte crossover of the weights as loaded",
    "section 3.3, section 6",
    Region(None, 1.0, "the threshold scales with s_w / s_kv, which is below one here", "x"),
    TRAINED,
    f"4-bit weights, 16-bit cache: {PAPER['quant4.closer'].printed} times closer",
)


def _where(name: str, what: str) -> Predicate:
    return Predicate(
        f"crossing of {name}",
        f"measured minus predicted crossing of {what}, as a share of its n*",
        "section 3.3",
        Region(-0.055, 0.055, "the paper times neither; 5.5% is what its other crossings keep"),
        frozenset(),
        "not timed",
    )


WHERE = {
    "int8": _where("int8", "8-bit weights"),
    "int4": _where("int4", "4-bit weights"),
    "budget": _where("budget", f"a selection of {BUDGET_TOKENS} tokens"),
}
CLAIM = Claim(
    name=NAME,
    title="Fewer bits per weight move the crossover closer, and a fixed KV budget has one of its own",
    paper="crossover",
    place="section 3.3, section 6",
    needs="a model with trained weights; 6 GB of memory",
    minutes={
        "embedded": "2.5 (quick: 0.7)",
        "gpu": "not run: see needs",
        "paper": "not run: contexts of the embedded model",
    },
    tables=(),
    predicates=(CLOSER, *WHERE.values()),
)


def measure(run: Run) -> None:
    """A pilot that chooses the contexts, then one process per block, every variant a group of its own in it."""
    from dataclasses import asdict

    from artifact.measure.cells import request
    from artifact.measure.precision_cells import PILOT, PILOT_STEPS, TIMED, crossing_contexts
    from artifact.records import Cell

    if run.profile.name != "embedded":
        raise NotRun("the contexts are those of the embedded model; run it with --profile embedded")
    variants = [one for one in VARIANTS if one[0].name in QUANTISED or not run.quick]
    blocks = QUICK_BLOCKS if run.quick else BLOCKS
    common = {"contexts": list(range(256, LONGEST + 1, 256)), "r_p": R_P, "r_kv": R_KV}

    def cell(key: str, task: str, steps: int, found: dict[str, list[int]], block: int) -> Cell:
        params = request(run.profile, [], steps, LONGEST) | common | {"order_seed": block}
        params["variants"] = [[asdict(variant), list(ends), found.get(variant.name, [])] for variant, ends in variants]
        return Cell(NAME, key, task, params, block)

    run.expect(1 + blocks)
    pilot = run.measure([cell("pilot", PILOT, PILOT_STEPS, {}, 0)])
    found = {variant.name: crossing_contexts(pilot, variant, ends, (R_P, R_KV)) for variant, ends in variants}
    run.measure([cell(f"block-{block}", TIMED, STEPS, found, block) for block in range(blocks)])


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Crossings of every variant per block."""
    rows = with_levels([row for row in rows if row.get("kind") == "precision"])
    blocks = sorted({row["block"] for row in rows})
    if not blocks:
        return [not_run(predicate, "no block was measured") for predicate in CLAIM.predicates]
    timed = {row["variant"]["name"] for row in rows}
    found = {v.name: [_crossing(rows, v, block) for block in blocks] for v, _ in VARIANTS if v.name in timed}
    loaded = _loaded_n_star(rows)
    # NumPy's maximum keeps NaN: a crossing that was not bracketed must not vanish behind the other.
    largest = [float(np.max([found[name][i].measured for name in QUANTISED])) / loaded for i in range(len(blocks))]
    findings = [find(CLOSER, block_interval(largest, unit="x"), profile, extra={"n* as loaded, tokens": loaded})]
    for name, predicate in WHERE.items():
        if name not in found:
            findings.append(left_out(predicate, "left out of a quick run"))
            continue
        one = found[name]
        apart = [(crossing.measured - crossing.predicted) / crossing.star for crossing in one]
        extra = {
            "n*, tokens": fmean(crossing.star for crossing in one),
            "predicted, tokens": fmean(crossing.predicted for crossing in one),
            "measured, tokens": fmean(crossing.measured for crossing in one),
            "weight bits": _bits(rows, name),
        }
        lost = sum(not math.isfinite(crossing.measured) for crossing in one)
        note = f"{lost} of {len(one)} blocks did not bracket the crossing" if lost else ""
        findings.append(find(predicate, block_interval(apart), profile, note, extra))
    return findings


def _crossing(rows: list[dict[str, Any]], variant: Variant, block: int) -> Crossing:
    mine = [row for row in rows if row["block"] == block and row["variant"]["name"] == variant.name]
    if not mine:
        raise ValueError(f"block {block} holds no rows of {variant.name}")
    return crossing(mine, variant, R_P, R_KV)


def _loaded_n_star(rows: list[dict[str, Any]]) -> float:
    """n* of the weights as loaded."""
    row = rows[0]
    setting = Setting(R_P, R_KV, float(row["loaded_weight_bits"]), float(row["kv_bits"]))
    return n_star(Shape(**row["shape"]), setting)


def _bits(rows: list[dict[str, Any]], name: str) -> float:
    return float(next(row["weight_bits"] for row in rows if row["variant"]["name"] == name))


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
