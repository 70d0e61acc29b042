"""Which cells locate a crossing: a pilot that chooses contexts, then blocks of one fresh process each.

A block holds a sweep, at the shortest and the longest context, and crossing rows at contexts around the crossings
that the pilot predicted. Costs and prediction come from the sweep rows, the measured crossing from the others. All
take turns in the same rounds: measured one after the other, in groups of different make-up, sweep rows favoured the
projection branch by up to a millisecond against crossing rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from artifact import gpu_state
from artifact.account import Setting, n_star
from artifact.claim import NotRun
from artifact.engine import memory_plan
from artifact.engine.checkpoints import open_checkpoint
from artifact.engine.prepare import GRID_TOKENS, grid
from artifact.judge.crossing import around, predict
from artifact.judge.levels import with_levels
from artifact.measure.cells import EXTRA_STEPS, Row, is_name, member, request
from artifact.profiles import Profile
from artifact.records import Cell, Run
from artifact.shapes import Shape, known_shape

TASK = "artifact.measure.cells:decode"
SPREAD = (0.7, 1.3)  # of the expected crossing; two contexts fix a line
# Half the distance of the two contexts is at least this share of n*, twice the largest difference from the prediction
# that a crossing claim accepts: where costs leave a crossing short of its n*, 30% of it would not reach that far.
REACH = 0.11
PILOT_STEPS = 8
# So many blocks start a fresh interpreter, the others are forked from one: no difference between the two was seen
# (docs/judge-rates.md), and what one placement of code and weights would bring to all blocks shows among these.
FRESH_BLOCKS = 3
MIDDLE = 0.65  # of the longest context
SHORTEST_TOKENS = 1024


@dataclass(frozen=True)
class Plan:
    """What a crossing claim measures: its name, keep-ratio pairs (r_p, r_kv), timed steps per run."""

    claim: str
    pairs: tuple[tuple[float, float], ...]
    steps: int


def longest_context(shape: Shape, steps: int, synthetic: bool) -> int:
    """The longest context on the grid that leaves room in the model's window for the steps of a run.

    Synthetic caches may pass the window by those steps: nothing there depends on trained positions.
    """
    room = 0 if synthetic else steps + EXTRA_STEPS + 1
    return (shape.window - room) // GRID_TOKENS * GRID_TOKENS


def fitting_context(profile: Profile, steps: int, groups: Callable[[int], list[list[Row]]]) -> memory_plan.Fit:
    """The longest context of the model's window whose groups fit the device. NotRun with the reason when none does."""
    shape, synthetic = model_shape(profile), is_name(profile.model)
    longest = longest_context(shape, steps, synthetic)
    free = gpu_state.free_bytes() if profile.device == "cuda" else None
    found = memory_plan.fit(shape, groups, longest, 4 if profile.dtype == "float32" else 2, synthetic, free)
    if isinstance(found, str):
        raise NotRun(found)
    return found


def doublings(longest: int) -> list[int]:
    """Return the contexts of a sweep: doublings from the shortest, then the longest."""
    contexts = []
    n = SHORTEST_TOKENS
    while n < 0.75 * longest:
        contexts.append(n)
        n *= 2
    return [*contexts, longest]


def model_shape(profile: Profile) -> Shape:
    """Dimensions of the profile's model, from its name or its checkpoint."""
    return known_shape(profile.model) if is_name(profile.model) else open_checkpoint(profile.model).shape


def measure_blocks(run: Run, plan: Plan, blocks: int) -> None:
    """Measure a pilot, then `blocks` blocks around the crossings that it predicts."""
    shape = model_shape(run.profile)
    fit = fitting_context(run.profile, plan.steps, lambda n: _largest_groups(plan, n))
    longest = fit.tokens
    if longest <= 2 * SHORTEST_TOKENS:
        raise NotRun(f"the window of {shape.window} tokens is too short for a sweep from {SHORTEST_TOKENS} tokens")
    run.expect(1 + blocks)
    pilot = with_levels(run.measure([pilot_cell(run.profile, plan, fit)]))
    contexts = crossing_contexts(pilot, plan, shape, longest)
    run.measure([block_cell(run.profile, plan, fit, block, contexts) for block in range(blocks)])


def _largest_groups(plan: Plan, longest: int) -> list[list[Row]]:
    """A group that holds at least what that of a block holds, wherever its crossings turn out to be."""
    anywhere = dict.fromkeys(plan.pairs, [longest] * len(SPREAD))
    return [[*sweep_group(plan, longest, "sweep"), *crossing_group(plan, anywhere)]]


def pilot_cell(profile: Profile, plan: Plan, fit: memory_plan.Fit) -> Cell:
    """A short sweep that only chooses the contexts of the blocks; no verdict reads it."""
    group = sweep_group(plan, fit.tokens, "pilot")
    return Cell(plan.claim, "pilot", TASK, request(profile, [group], PILOT_STEPS, fit.tokens, fit.note))


def sweep_group(plan: Plan, longest: int, part: str) -> list[Row]:
    """Members that give the kernel costs and the slope of dense decoding.

    The first pair is swept at the shortest and the longest context, where it is also judged. The other ratios, whose
    crossings lie at shorter contexts, are swept at the shortest and a middle one: a cost that is not quite constant
    is then taken near its use.
    """
    nominal_p, nominal_kv = plan.pairs[0]
    middle = grid(round(MIDDLE * longest))
    single = [*((r_p, 1.0) for r_p in _ratios(plan, 0)), *((1.0, r_kv) for r_kv in _ratios(plan, 1))]
    others = [mode for mode in single if mode not in ((nominal_p, 1.0), (1.0, nominal_kv))]
    settings = [(SHORTEST_TOKENS, mode) for mode in ((1.0, 1.0), *single)]
    settings += [(middle, mode) for mode in ((1.0, 1.0), *others)]
    settings += [(longest, mode) for mode in ((1.0, 1.0), (nominal_p, 1.0), (1.0, nominal_kv), plan.pairs[0])]
    return [member(n, *mode, part=part) for n, mode in settings]


def crossing_contexts(pilot: list[Row], plan: Plan, shape: Shape, longest: int) -> dict[tuple[float, float], list[int]]:
    """Contexts of the crossing rows, around the prediction that the pilot gives for a pair, else around its n*.

    Pairs after the first have neighbouring crossings, and with contexts in common they share rows.
    """
    centres, stars = [], []
    for r_p, r_kv in plan.pairs:
        star = _n_star(shape, r_p, r_kv, pilot[0])
        predicted = predict(pilot, r_p, r_kv, star).tokens
        centres.append(max(predicted, GRID_TOKENS) if math.isfinite(predicted) else star)
        stars.append(star)
    low, high = SHORTEST_TOKENS + GRID_TOKENS, longest - GRID_TOKENS
    found = {}
    for index, pair in enumerate(plan.pairs):
        several = slice(1, None) if index else slice(0, 1)
        centre, star = (sum(values[several]) / len(values[several]) for values in (centres, stars))
        reach = max(SPREAD[1] - 1.0, REACH * star / centre)
        found[pair] = around(centre, (1.0 - reach, 1.0 + reach), GRID_TOKENS, low, high)
    return found


def crossing_group(plan: Plan, contexts: dict[tuple[float, float], list[int]]) -> list[Row]:
    """Both branches of every pair at its contexts, each member once however many pairs it serves."""
    wanted = [(n, *mode) for pair in plan.pairs for n in contexts[pair] for mode in ((pair[0], 1.0), (1.0, pair[1]))]
    return [member(*one, part="crossing") for one in dict.fromkeys(wanted)]


def block_cell(
    profile: Profile, plan: Plan, fit: memory_plan.Fit, block: int, contexts: dict[tuple[float, float], list[int]]
) -> Cell:
    """One fresh process: the sweep and both branches of every pair at the contexts around its crossing, as one group,
    alive together and interleaved step by step.
    """
    group = [*sweep_group(plan, fit.tokens, "sweep"), *crossing_group(plan, contexts)]
    params = request(profile, [group], plan.steps, fit.tokens, fit.note, order_seed=block)
    return Cell(plan.claim, f"block-{block}", TASK, params, block, fresh=block < FRESH_BLOCKS)


def _ratios(plan: Plan, which: int) -> list[float]:
    return sorted({pair[which] for pair in plan.pairs})


def _n_star(shape: Shape, r_p: float, r_kv: float, row: Row) -> float:
    return n_star(shape, Setting(r_p, r_kv, weight_bits=row["weight_bits"], kv_bits=row["kv_bits"]))
