"""Which cells locate a crossing: per block one sweep process, then one crossing process at other contexts.

The first block's sweep decides the contexts of the crossing cells of all blocks: around its predicted crossings.
Sweep and crossing of a block follow each other in time, so slow drift of the machine falls on a prediction and its
measurement alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from artifact.account import Setting, n_star
from artifact.cells import EXTRA_STEPS, Row, is_name, member, request
from artifact.checkpoints import open_checkpoint
from artifact.claim import Finding, NotRun
from artifact.crossing import around, predict
from artifact.prepare import GRID_TOKENS
from artifact.profiles import Profile
from artifact.records import Cell, Run
from artifact.shapes import Shape, known_shape
from artifact.stats import Verdict

TASK = "artifact.cells:decode"
SPREAD = (0.85, 1.0, 1.15)
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


def measure_blocks(
    run: Run, plan: Plan, blocks: int, most: int, judge: Callable[[list[Row], Profile], list[Finding]]
) -> None:
    """Measure `blocks` blocks, then more, up to `most`, while a predicate is inconclusive and the time budget lasts."""
    shape = model_shape(run.profile)
    longest = longest_context(shape, plan.steps, is_name(run.profile.model))
    if longest <= 2 * SHORTEST_TOKENS:
        raise NotRun(f"the window of {shape.window} tokens is too short for a sweep from {SHORTEST_TOKENS} tokens")
    contexts: dict[tuple[float, float], list[int]] = {}
    run.expect(2 * blocks)
    for block in range(most):
        left = run.time_left_s()
        sweep = run.measure([sweep_cell(run.profile, plan, longest, block)])
        if not contexts:
            contexts = crossing_contexts(sweep, plan, shape, longest)
        run.measure([crossing_cell(run.profile, plan, longest, block, contexts)])
        taken = left - run.time_left_s()
        if block + 1 >= blocks and (
            run.time_left_s() < taken or not undecided(judge(run.rows(plan.claim), run.profile))
        ):
            return


def undecided(findings: list[Finding]) -> bool:
    """Whether more blocks could still change a verdict."""
    return any(finding.verdict is Verdict.INCONCLUSIVE for finding in findings)


def sweep_cell(profile: Profile, plan: Plan, longest: int, block: int) -> Cell:
    """All modes at the shortest and the longest context, all alive together: kernel costs and the slope of dense
    decoding.
    """
    first = plan.pairs[0]
    settings = [
        (1.0, 1.0),
        *((r_p, 1.0) for r_p in _ratios(plan, 0)),
        *((1.0, r_kv) for r_kv in _ratios(plan, 1)),
        first,
    ]
    group = [member(n, r_p, r_kv) for n in (SHORTEST_TOKENS, longest) for r_p, r_kv in settings]
    params = request(profile, [group], plan.steps, longest)
    return Cell(plan.claim, f"sweep-{block}", TASK, params, block)


def crossing_contexts(sweep: list[Row], plan: Plan, shape: Shape, longest: int) -> dict[tuple[float, float], list[int]]:
    """Contexts of the crossing cells: around the prediction that the first sweep gives for each pair."""
    found = {}
    for r_p, r_kv in plan.pairs:
        predicted = predict(sweep, r_p, r_kv, _n_star(shape, r_p, r_kv, sweep[0])).tokens
        low = SHORTEST_TOKENS + GRID_TOKENS
        found[r_p, r_kv] = around(predicted, SPREAD, GRID_TOKENS, low, longest - GRID_TOKENS)
    return found


def crossing_cell(
    profile: Profile, plan: Plan, longest: int, block: int, contexts: dict[tuple[float, float], list[int]]
) -> Cell:
    """Both branches of every pair at the contexts around its crossing; the members of a pair are alive together."""
    groups = [
        [one for n in contexts[r_p, r_kv] for one in (member(n, r_p, 1.0), member(n, 1.0, r_kv))]
        for r_p, r_kv in plan.pairs
    ]
    params = request(profile, groups, plan.steps, longest)
    return Cell(plan.claim, f"crossing-{block}", TASK, params, block)


def _ratios(plan: Plan, which: int) -> list[float]:
    return sorted({pair[which] for pair in plan.pairs})


def _n_star(shape: Shape, r_p: float, r_kv: float, row: Row) -> float:
    return n_star(shape, Setting(r_p, r_kv, weight_bits=row["weight_bits"], kv_bits=row["kv_bits"]))
