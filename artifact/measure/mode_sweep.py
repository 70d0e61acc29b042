"""The sweep that several timing claims stand on: four modes over context and the one-time selection, a process a block.

`speedup_bounds`, `selection_cost` and `dispatch` ask for the very same cells: in one run they are measured once.
"""

from __future__ import annotations

from artifact.measure.crossing_cells import doublings, fitting_context
from artifact.measure.gate_cells import TASK, gate_request, group_at
from artifact.records import Cell, Run
from artifact.samples import Row

R_P, R_KV = 0.5, 0.3  # the paper's nominal pair
STEPS, QUICK_STEPS = 12, 8


def cells(run: Run, claim: str, blocks: int) -> list[Cell]:
    """Cells of the first `blocks` blocks at every doubling of the context up to the longest that fits; a quick run
    leaves lengths in between out.
    """
    steps = QUICK_STEPS if run.quick else STEPS
    fit = fitting_context(run.profile, steps, lambda n: [_group(doublings(n))])
    contexts = doublings(fit.tokens)
    if run.quick:
        contexts = [contexts[0], *contexts[-2:]]
    params = gate_request(run.profile, (R_P, R_KV), contexts, steps, fit.tokens, fit.note)
    params["groups"] = [_group(contexts)]  # all lengths take turns in the same rounds
    return [Cell(claim, f"sweep-{block}", TASK, params | {"order_seed": block}, block) for block in range(blocks)]


def _group(contexts: list[int]) -> list[Row]:
    return [one for n in contexts for one in group_at(n, R_P, R_KV)]
