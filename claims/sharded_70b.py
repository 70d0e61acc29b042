"""Llama-3.1-70B, split over two GPUs, does not cross within its window (crossover, section 6).

The paper: larger feed-forward layers push the crossover outward, beyond the 128K window of Llama-3.1-70B at the keep
ratios studied; it times no 70B model. Measured here at the window's end, with tensor parallelism: the step time of the
projection branch at 50% over that of KV selection at 30%. Their order at the window's end is the claim; the two modes
are timed one after the other, because two GPUs hold the projections in one layout only.

    python claims/sharded_70b.py [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.account import K_TOKENS, Mode, Setting, n_star, step_bytes
from artifact.claim import Claim, Finding, NotRun, Predicate, find, not_run, run_as_script
from artifact.profiles import Profile
from artifact.shapes import Shape, known_shape
from artifact.stats import Region, block_interval, require_equal_arms
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "sharded_70b"
PAPER = figures("crossover")
MODEL = "llama-3.1-70b"
RANKS = 2
R_P, R_KV = 0.5, 0.3
BLOCKS, QUICK_BLOCKS = 7, 3
STEPS, QUICK_STEPS = 40, 20
ROOM_TOKENS = 128  # of the window, for the steps
COMMAND = f"artifact verify {NAME} --profile gpu"
GPU = frozenset(("gpu",))

CLAIM = Claim(
    name=NAME,
    title="Llama-3.1-70B over two GPUs does not cross within its window",
    paper="crossover",
    place="section 6",
    needs=f"two GPUs with 100 GB each: {COMMAND}",
    minutes=dict.fromkeys(("embedded", "paper"), "not run: see needs") | {"gpu": "15, on two GPUs"},
    tables=(),
    predicates=(
        Predicate(
            "projection leads at the window's end",
            "step time of the projection branch over that of KV selection",
            "section 6",
            Region(None, 1.0, "the crossover lies beyond while the projection branch is the faster one", "x"),
            GPU,
            f"beyond {PAPER['70b.beyond_window'].printed}K tokens",
        ),
        Predicate(
            "ranks share the bytes",
            "bytes that all ranks read in a step over the byte account, the mode furthest from it",
            "section 3.1",
            Region(0.97, 1.03, "the account, within what thresholds at 50% keep vary by", "x"),
            GPU,
            "not timed",
        ),
    ),
)


def measure(run: Run) -> None:
    """One process per block, and in it one per GPU. NotRun, with the command, without two GPUs that hold the model."""
    from dataclasses import asdict

    from artifact.gpu_state import free_bytes, sample
    from artifact.measure.parallel_cells import TASK
    from artifact.records import Cell

    if run.profile.name != "gpu" or len(sample()) < RANKS:
        raise NotRun(f"needs {RANKS} GPUs with 100 GB each; run `{COMMAND}` there", yours=True)
    shape = known_shape(MODEL)
    context, item = shape.window - ROOM_TOKENS, 2
    free, needed = free_bytes(), rank_bytes(shape, context, item)
    if free is not None and free < needed:
        raise NotRun(
            f"{shape.name} needs {needed / 1e9:.0f} GB on each of {RANKS} GPUs, the first has {free / 1e9:.0f} GB "
            f"free; run `{COMMAND}` on larger ones",
            yours=True,
        )
    steps = QUICK_STEPS if run.quick else STEPS
    params = {"shape": asdict(shape), "device": "cuda", "dtype": run.profile.dtype, "size": RANKS, "context": context}
    params |= {"steps": steps, "r_p": R_P, "r_kv": R_KV}
    for block in range(QUICK_BLOCKS if run.quick else BLOCKS):
        run.measure([Cell(NAME, f"block-{block}", TASK, params | {"order_seed": block}, block, 1800.0)])


def rank_bytes(shape: Shape, context: int, item: int) -> float:
    """Bytes that one rank holds at its peak: projections in one layout, both tables, full and packed cache, runtime."""
    projections = shape.layers * shape.projection_params / RANKS
    cache = context * shape.layers * shape.kv_values_per_token / RANKS
    return item * (projections + 2 * shape.vocab * shape.hidden / RANKS + (1 + R_KV) * cache) + (8 << 30)


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Ratios of step times per block, and every mode's bytes over the account."""
    leads, shared = CLAIM.predicates
    rows = [row for row in rows if row.get("kind") == "rank"]
    if not rows:
        return [not_run(predicate, f"no block was measured; run `{COMMAND}`") for predicate in CLAIM.predicates]
    blocks = sorted({row["block"] for row in rows})
    times = {mode: [_ms(rows, block, mode) for block in blocks] for mode in (Mode.PROJECTION, Mode.KV, Mode.DENSE)}
    require_equal_arms({mode.value: found for mode, found in times.items()})
    ratios = [a / b for a, b in zip(times[Mode.PROJECTION], times[Mode.KV], strict=True)]
    shape, context = Shape(**rows[0]["shape"]), int(rows[0]["context"])
    allowed = {mode: step_bytes(shape, _setting(mode), context, mode) for mode in times}
    extra: dict[str, float | str] = {
        "n* of the bytes, K tokens": n_star(shape, Setting(r_p=R_P, r_kv=R_KV)) / K_TOKENS,
        "measured at, K tokens": context / K_TOKENS,
        "ratio of the bytes": allowed[Mode.PROJECTION] / allowed[Mode.KV],
    }
    extra |= {f"{mode.value}, ms": fmean(found) for mode, found in times.items()}
    worst = [
        max((_read(rows, block, mode) / allowed[mode] for mode in times), key=lambda x: abs(x - 1)) for block in blocks
    ]
    return [
        find(leads, block_interval(ratios, unit="x"), profile, "", extra),
        find(shared, block_interval(worst, unit="x"), profile),
    ]


def _setting(mode: Mode) -> Setting:
    return Setting(r_p=R_P if mode is Mode.PROJECTION else 1.0, r_kv=R_KV if mode is Mode.KV else 1.0)


def _of(rows: list[dict[str, Any]], block: int, mode: Mode) -> list[dict[str, Any]]:
    """The rows of all ranks. ValueError when one is missing."""
    own = [row for row in rows if row["block"] == block and row["mode"] == mode.value]
    if sorted(row["rank"] for row in own) != list(range(RANKS)):
        raise ValueError(f"block {block} lacks ranks of {mode.value}")
    return own


def _ms(rows: list[dict[str, Any]], block: int, mode: Mode) -> float:
    """Median step time of the slower rank: a step has ended when both have."""
    return max(median(row["ms"]) for row in _of(rows, block, mode))


def _read(rows: list[dict[str, Any]], block: int, mode: Mode) -> float:
    return sum(row["projection_bytes"] + row["kv_bytes"] + row["head_bytes"] for row in _of(rows, block, mode))


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
