"""Batches move the crossover of each sequence towards short context (crossover, section 3.3 and 4.4, Appendix F).

The paper: the channels that at least one sequence activates cover 92% of the projection weights of Llama-3.1-8B at four
sequences and 98.5% at eight, so n*_4 falls to 3.0K tokens, far below n*/4. Measured here: the union u_B on real decode
steps of different texts, n*_B from it, and batched steps of both branches, whose sparse products read the union and
whose sequences each read a cache of their own; the crossing of their times against the account's.

    python claims/batching.py [--quick]
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, NotRun, Predicate, find, not_run, run_as_script
from artifact.judge import batching
from artifact.judge.crossing import locate, pick, predict
from artifact.judge.levels import with_levels
from artifact.profiles import Profile
from artifact.shapes import Shape
from artifact.stats import Region, block_interval
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "batching"
PAPER = figures("crossover")
R_P, R_KV = 0.5, 0.3
BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16), (1, 2, 4, 8)
CONTEXT, QUICK_CONTEXT = 128, 64  # of the passages whose union is counted
COUNTED_STEPS = 10
BLOCKS, QUICK_BLOCKS = 7, 3
STEPS, QUICK_STEPS = 8, 6
# (batch, (shortest, longest) context of the sweep): n*_B falls faster than 1/B, and both ends should see it between.
SWEEPS = ((1, (1024, 7936)), (2, (512, 3072)), (4, (256, 1536)))
QUICK_SWEEPS = SWEEPS[1:]
TRAINED = frozenset(("embedded", "paper"))


def _predicate(
    name: str, statement: str, place: str, region: Region, paper: str, asserted: frozenset[str] = TRAINED
) -> Predicate:
    return Predicate(name, statement, place, region, asserted, paper)


RISES = _predicate(
    "the union rises",
    "smallest growth of u_B from one batch size to the next",
    "section 4.4, Batching",
    Region(0.0, None, "a further sequence can only add channels; equality would mean identical activations"),
    f"{PAPER['batch.union.4'].printed}% at 4, {PAPER['batch.union.8'].printed}% at 8 sequences (Llama-3.1-8B)",
)
LARGEST = _predicate(
    "the union at eight sequences",
    "u_8, the share of projection weights that any of eight sequences activates",
    "section 4.4, Batching",
    Region(None, None, "the paper's share is that of another model; it is shown beside ours"),
    f"{PAPER['batch.union.8'].printed}%",
    frozenset(),
)
BELOW = _predicate(
    "batched crossover at most n*/B",
    "largest B n*_B / n* over the batch sizes above one",
    "section 3.3",
    Region(None, 1.0, "u_B is at least r_P, so n*_B is at most n*/B", "x"),
    f"n*_4 = {PAPER['batch.n_star.4'].printed}K, n*/4 = 18.6K",
)
ORDER = _predicate(
    "crossings keep their order",
    "smallest distance between the measured crossings of neighbouring batch sizes, larger batch earlier",
    "section 4.3, Appendix F",
    Region(0.0, None, "a batch with smaller n*_B crosses earlier on any machine", "tokens"),
    "order of the byte crossovers",
)
AGREES = _predicate(
    "measured batched crossing",
    "measured minus predicted crossing of the largest timed batch, as a share of its n*_B",
    "section 3.3",
    Region(None, None, "the paper times no batch; both numbers are shown"),
    "not timed",
    frozenset(),
)

CLAIM = Claim(
    name=NAME,
    title="Batches move the crossover of each sequence towards short context",
    paper="crossover",
    place="section 3.3, section 4.4, Appendix F",
    needs="a model with trained weights and its tokenizer; 6 GB of memory",
    minutes={
        "embedded": "3 (quick: 0.7)",
        "gpu": "not run: synthetic weights have no union of their own",
        "paper": "10",
    },
    tables=(),
    predicates=(RISES, LARGEST, BELOW, ORDER, AGREES),
)


def measure(run: Run) -> None:
    """Unions over disjoint passages per block, then batched steps per block, every block a fresh process."""
    from artifact.measure.batch_cells import ROOM_STEPS, TIMED, UNION
    from artifact.measure.cells import request
    from artifact.measure.quality_cells import profile_params
    from artifact.records import Cell

    if run.profile.name == "gpu":
        raise NotRun("the union of active channels needs trained weights; run it with --profile embedded")
    batches, context = (QUICK_BATCHES, QUICK_CONTEXT) if run.quick else (BATCHES, CONTEXT)
    blocks, steps = (QUICK_BLOCKS, QUICK_STEPS) if run.quick else (BLOCKS, STEPS)
    common = profile_params(run.profile) | {"batches": list(batches), "context": context, "r_p": R_P}
    counts = [common | {"steps": COUNTED_STEPS, "first": block * max(batches)} for block in range(blocks)]
    run.measure([Cell(NAME, f"union-{block}", UNION, own, block, timed=False) for block, own in enumerate(counts)])
    sweeps = QUICK_SWEEPS if run.quick else SWEEPS
    longest = max(long for _, (_, long) in SWEEPS)  # also of a quick run: the prefill is shared with other claims
    ends = [n for _, pair in sweeps for n in range(256, max(pair) + 1, 256)]
    # Every sequence of a batch goes on with a passage of its own behind the longest prefill.
    behind = (steps + ROOM_STEPS) * max(batch for batch, _ in sweeps)
    params = request(run.profile, [], behind, longest) | {"timed_steps": steps, "r_p": R_P, "r_kv": R_KV}
    params |= {"contexts": ends, "sweeps": [[batch, list(pair)] for batch, pair in sweeps]}
    orders = [params | {"order_seed": block} for block in range(blocks)]
    run.measure([Cell(NAME, f"batched-{block}", TIMED, order, block) for block, order in enumerate(orders)])


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge the union over passages and the crossings over processes."""
    counted = [row for row in rows if row.get("kind") == "union"]
    timed = with_levels([row for row in rows if row.get("kind") == "batched"])
    return _unions(counted, timed, profile) + _crossings(timed, profile)


def _unions(counted: list[dict[str, Any]], timed: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    shares = batching.unions(counted)
    if not shares:
        return [not_run(predicate, "no union was counted") for predicate in (RISES, LARGEST, BELOW)]
    rises = [min(b - a for a, b in itertools.pairwise(found.values())) for found in shares]
    bits = (timed[0]["weight_bits"], timed[0]["kv_bits"]) if timed else (16.0, 16.0)
    stars = [batching.crossovers(found, Shape(**counted[0]["shape"]), R_KV, bits) for found in shares]
    sizes = list(shares[0])
    extra: dict[str, float | str] = {f"u_{batch}": fmean(found[batch] for found in shares) for batch in sizes}
    extra |= {f"n*_{batch}, tokens": fmean(found[batch] for found in stars) for batch in sizes}
    relative = [max(batch * found[batch] / found[1] for batch in sizes if batch > 1) for found in stars]
    eight = [found[8] for found in shares if 8 in found]
    return [
        find(RISES, block_interval(rises), profile, extra=extra),
        find(LARGEST, block_interval(eight), profile) if eight else not_run(LARGEST, "no batch of eight"),
        find(BELOW, block_interval(relative, unit="x"), profile),
    ]


def _crossings(timed: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    batches, blocks = sorted({row["batch"] for row in timed}), sorted({row["block"] for row in timed})
    if not batches:
        return [not_run(predicate, "no batched step was timed") for predicate in (ORDER, AGREES)]
    extra: dict[str, float | str] = {}
    measured: dict[int, list[float]] = {batch: [] for batch in batches}
    at_most: dict[int, list[float]] = {batch: [] for batch in batches}
    apart: dict[int, list[float]] = {batch: [] for batch in batches}
    for batch in batches:
        stars, predictions = [], []
        for block in blocks:
            mine = [row for row in timed if row["batch"] == batch and row["block"] == block]
            sweep = [row for row in mine if row["part"] == "sweep"]
            stars.append(batching.batched_n_star(sweep, batch, R_P, R_KV))
            predictions.append(predict(sweep, R_P, R_KV, stars[-1]).tokens)
            around = [row for row in mine if row["part"] == "crossing"]
            measured[batch].append(locate(around, R_P, R_KV))
            at_most[batch].append(_at_most(around, measured[batch][-1]))
            apart[batch].append((measured[batch][-1] - predictions[-1]) / stars[-1])
        found = {"n*": stars, "predicted": predictions, "measured": measured[batch]}
        extra |= {f"{name} of {batch}, tokens": fmean(values) for name, values in found.items()}
    # NumPy's minimum keeps NaN: a crossing that was not bracketed must not vanish behind the others.
    pairs = list(itertools.pairwise(batches))
    gaps = [float(np.min([measured[a][i] - at_most[b][i] for a, b in pairs])) for i in range(len(blocks))]
    early = [
        b
        for b in batches
        if any(math.isnan(m) and not math.isnan(u) for m, u in zip(measured[b], at_most[b], strict=True))
    ]
    note = f"KV selection leads at every context of batch {', '.join(map(str, early))}: crossed before" if early else ""
    return [
        find(ORDER, block_interval(gaps, unit="tokens"), profile, note, extra),
        find(AGREES, block_interval(apart[batches[-1]]), profile, f"batch of {batches[-1]}"),
    ]


def _at_most(rows: list[dict[str, Any]], measured: float) -> float:
    """The measured crossing; where the projection trails at every context, the shortest one, which it lies below."""
    kept = pick(rows, 1.0, R_KV)
    over = {context: level - kept[context] for context, level in pick(rows, R_P, 1.0).items() if context in kept}
    return float(min(over)) if math.isnan(measured) and over and min(over.values()) > 0 else measured


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
