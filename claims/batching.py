"""Batches move the crossover of each sequence towards short context (crossover, section 3.3 and 4.4, Appendix F).

The paper: the channels that at least one sequence activates cover 92% of the projection weights of Llama-3.1-8B at four
sequences and 98.5% at eight, so n*_4 falls to 3.0K tokens, far below n*/4. Measured here: the union u_B on real decode
steps of different texts, n*_B from it, and batched steps of both branches, whose sparse products read the union and
whose sequences each read a cache of their own; the crossing of their times against the account's. On the GPU profile
the steps alone are timed: its weights are synthetic, and so is the union that its steps read.

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

from artifact.claim import Claim, Finding, NotRun, Predicate, find, left_out, not_run, run_as_script
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
BATCHES = (1, 2, 4, 8)
CONTEXT, QUICK_CONTEXT = 128, 64  # of the passages whose union is counted
COUNTED_STEPS = 6
BLOCKS, QUICK_BLOCKS = 7, 3
STEPS = 6
# (batch, (shortest, longest) context of the sweep): n*_B falls faster than 1/B, and both ends should see it between.
# One sequence is timed by the claim `crossover`; it crosses farther from two than two do from four.
SWEEPS = ((2, (512, 3072)), (4, (256, 1536)))
LONGEST = 7936  # of the prefill, which other claims make, too
# The same on a GPU, as shares of the n* of one sequence, whatever the model: if sequences activate channels
# independently, n*_2 is a quarter of it and n*_4 a thirty-second. Sweeps of neighbouring batches overlap.
GPU_SHARES = ((1, (0.1, 1.7)), (2, (0.03, 0.43)), (4, (0.013, 0.11)))
GPU_STEPS, QUICK_GPU_STEPS = 24, 8
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
# Where kernels cost more than a crossing is worth, crossings of larger batches lie before every context and have no
# order. Asserted where that can be; of the profiles that assert the order it is shown.
GROWS = _predicate(
    "the KV branch gains with the batch",
    "smallest growth, from one batch size to the next at one context, of what the projection branch takes longer",
    "section 3.3",
    Region(
        0.0, None, "a larger batch skips fewer weights and more entries; kernel costs that stay the same cancel", "ms"
    ),
    "not timed",
    frozenset(("gpu",)),
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
    needs="a model; 6 GB of memory (embedded) or a CUDA GPU (gpu: 66 GB); trained weights for the union",
    minutes={"embedded": "3 (quick: 0.7)", "gpu": "3 (quick: 0.8)", "paper": "15"},
    tables=(),
    predicates=(RISES, LARGEST, BELOW, ORDER, GROWS, AGREES),
)


def measure(run: Run) -> None:
    """Unions over disjoint passages per block where weights are trained, then batched steps per block, every block a
    fresh process.
    """
    from artifact.measure.batch_cells import UNION
    from artifact.measure.cells import is_name
    from artifact.measure.quality_cells import profile_params
    from artifact.records import Cell

    blocks = QUICK_BLOCKS if run.quick else BLOCKS
    if not is_name(run.profile.model):
        context = QUICK_CONTEXT if run.quick else CONTEXT
        common = profile_params(run.profile) | {"batches": list(BATCHES), "context": context, "r_p": R_P}
        counts = [common | {"steps": COUNTED_STEPS, "first": block * max(BATCHES)} for block in range(blocks)]
        run.measure([Cell(NAME, f"union-{block}", UNION, own, block) for block, own in enumerate(counts)])
    _timed(run, blocks)


def _timed(run: Run, blocks: int) -> None:
    from artifact.measure.batch_cells import ROOM_STEPS, TIMED, members
    from artifact.measure.cells import request
    from artifact.records import Cell

    if run.profile.device == "cuda":
        steps = QUICK_GPU_STEPS if run.quick else GPU_STEPS
        sweeps, longest, note = _gpu_sweeps(run, (steps + ROOM_STEPS) * max(batch for batch, _ in GPU_SHARES))
        ends = sorted({one[0] for _, (short, long) in sweeps for one in members(short, long, R_P, R_KV)})
    else:
        steps, note = STEPS, ""
        sweeps, longest = list(SWEEPS), LONGEST
        ends = [n for _, pair in sweeps for n in range(256, max(pair) + 1, 256)]
    # Every sequence of a batch goes on with a passage of its own behind the longest prefill.
    behind = (steps + ROOM_STEPS) * max(batch for batch, _ in sweeps)
    params = request(run.profile, [], behind, longest, note) | {"timed_steps": steps, "r_p": R_P, "r_kv": R_KV}
    params |= {"contexts": ends, "sweeps": [[batch, list(pair)] for batch, pair in sweeps]}
    orders = [params | {"order_seed": block} for block in range(blocks)]
    run.measure([Cell(NAME, f"batched-{block}", TIMED, order, block) for block, order in enumerate(orders)])


def _gpu_sweeps(run: Run, behind: int) -> tuple[list[tuple[int, tuple[int, int]]], int, str]:
    """Sweeps of the profile's model that fit, the context to prefill, and what was left out."""
    from artifact import gpu_state
    from artifact.measure import batch_plan
    from artifact.measure.cells import is_name
    from artifact.measure.crossing_cells import longest_context, model_shape

    shape, synthetic = model_shape(run.profile), is_name(run.profile.model)
    asked = batch_plan.around(shape, GPU_SHARES[1:] if run.quick else GPU_SHARES, R_P, R_KV)
    window = longest_context(shape, behind, synthetic)
    item = 4 if run.profile.dtype == "float32" else 2
    sweeps, note = batch_plan.fitting(shape, asked, window, R_KV, item, synthetic, gpu_state.free_bytes())
    if not sweeps:
        raise NotRun(note)
    return sweeps, max(long for _, (_, long) in sweeps), note


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge the union over passages and the crossings over processes."""
    counted = [row for row in rows if row.get("kind") == "union"]
    timed = with_levels([row for row in rows if row.get("kind") == "batched"])
    note = ""
    if profile.name not in TRAINED and not counted:
        counted, note = batching.timed_unions(timed), "union of synthetic activations"
    return [*_unions(counted, timed, profile, note), *_crossings(timed, profile), *_same_context(timed, profile)]


def _unions(counted: list[dict[str, Any]], timed: list[dict[str, Any]], profile: Profile, note: str) -> list[Finding]:
    shares = batching.unions(counted)
    if not shares or len(shares[0]) < 2:
        return [not_run(predicate, "no union of two batch sizes was counted") for predicate in (RISES, LARGEST, BELOW)]
    rises = [min(b - a for a, b in itertools.pairwise(found.values())) for found in shares]
    bits = (timed[0]["weight_bits"], timed[0]["kv_bits"]) if timed else (16.0, 16.0)
    stars = [batching.crossovers(found, Shape(**counted[0]["shape"]), R_KV, bits) for found in shares]
    sizes = list(shares[0])
    extra: dict[str, float | str] = {f"u_{batch}": fmean(found[batch] for found in shares) for batch in sizes}
    extra |= {f"n*_{batch}, tokens": fmean(found[batch] for found in stars) for batch in sizes}
    single = 1 in sizes  # a quick run on a GPU leaves single sequences out
    relative = [max(batch * found[batch] / found[1] for batch in sizes if batch > 1) for found in stars if single]
    eight = [found[8] for found in shares if 8 in found]
    return [
        find(RISES, block_interval(rises), profile, note, extra),
        find(LARGEST, block_interval(eight), profile, note) if eight else not_run(LARGEST, "no batch of eight"),
        find(BELOW, block_interval(relative, unit="x"), profile, note)
        if single
        else left_out(BELOW, "left out of a quick run"),
    ]


def _crossings(timed: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    batches, blocks = sorted({row["batch"] for row in timed}), sorted({row["block"] for row in timed})
    if len(batches) < 2:
        return [not_run(predicate, "no two batch sizes were timed") for predicate in (ORDER, AGREES)]
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


def _same_context(timed: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """What the projection branch takes longer than the KV branch, by batch size, at a context that all sweeps hold."""
    context, leads = batching.leads(timed, R_P, R_KV)
    if not leads:
        return [not_run(GROWS, "no two batch sizes were timed at one context")]
    grown = [min(b - a for a, b in itertools.pairwise(block)) for block in zip(*leads.values(), strict=True)]
    extra: dict[str, float | str] = {f"ms longer at {batch}": fmean(values) for batch, values in leads.items()}
    return [find(GROWS, block_interval(grown, unit="ms"), profile, f"at {context:,} tokens", extra)]


def _at_most(rows: list[dict[str, Any]], measured: float) -> float:
    """The measured crossing; where the projection trails at every context, the shortest one, which it lies below."""
    kept = pick(rows, 1.0, R_KV)
    over = {context: level - kept[context] for context, level in pick(rows, R_P, 1.0).items() if context in kept}
    return float(min(over)) if math.isnan(measured) and over and min(over.values()) > 0 else measured


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
