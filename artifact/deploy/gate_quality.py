"""Which modes a gate may choose: a perplexity budget for every branch, and retrieval for those that evict entries
(crossover, sections 5.1 and 6: budgets alone do not see distant information go).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from artifact.account import Mode
from artifact.deploy.gate import Check
from artifact.deploy.gate_costs import SELECTING
from artifact.measure import quality, quality_cells
from artifact.measure.configuration import Configuration
from artifact.measure.quality import Protocol
from artifact.profiles import Profile

Row = dict[str, Any]
SPARSE = (Mode.PROJECTION, Mode.KV, Mode.BOTH)
RETRIEVAL = ("passkey", "multikey")
# Of the placements that dense decoding answers; a window of 30% answers 4 in 10 (crossover, section 5.1).
LEAST_ANSWERED = 0.9


def configurations(r_p: float, r_kv: float) -> dict[Mode, Configuration]:
    """The configuration of every mode at these keep ratios."""
    return {
        Mode.DENSE: Configuration(),
        Mode.PROJECTION: Configuration(r_p=r_p),
        Mode.KV: Configuration(r_kv=r_kv, method="snapkv"),
        Mode.BOTH: Configuration(r_p, r_kv, "snapkv"),
    }


def skipped(reason: str) -> tuple[Check, ...]:
    """Every check as one that was not made, with the reason."""
    checks = [Check(mode, "perplexity", None, f"skipped: {reason}") for mode in SPARSE]
    return tuple(checks + [Check(mode, name, None, f"skipped: {reason}") for mode in SELECTING for name in RETRIEVAL])


def measure(
    profile: Profile,
    arms: Mapping[Mode, Configuration],
    protocol: Protocol,
    budget: float,
    placements: int,
    say: Callable[[str], None],
) -> tuple[Check, ...]:
    """Score windows and answer prompts in every mode and compare with dense decoding.

    budget: largest increase of perplexity as a share of the dense one. placements: prompts per retrieval test, of as
    many tokens as a window prefills; 0 skips them.
    """
    request = quality_cells.profile_params(profile) | {"arms": [arm.record() for arm in arms.values()]}
    windows = {"context": protocol.context_tokens, "scored": protocol.scored_tokens, "windows": protocol.windows}
    chosen = {"chosen": list(range(protocol.windows))}
    scored = _rows(quality_cells.scored(request | windows | chosen), say)
    checks = perplexity_checks(scored, arms, budget)
    if placements == 0:
        return (*checks, *(check for check in skipped("no placements were asked for") if check.name in RETRIEVAL))
    prompts = [quality_cells.prompts_of(name, protocol.context_tokens, placements) for name in RETRIEVAL]
    answered = _rows(quality_cells.answered(request | {"prompts": prompts, "tuning": False}), say)
    return (*checks, *retrieval_checks(answered, arms))


def perplexity_checks(rows: Sequence[Row], arms: Mapping[Mode, Configuration], budget: float) -> tuple[Check, ...]:
    """One check per branch and their composition from the rows of scored windows."""
    losses = quality.losses(rows)
    checks = []
    for mode in SPARSE:
        change = quality.increase(losses, arms[mode].label)
        detail = f"{change.point:+.1%} [{change.low:+.1%}, {change.high:+.1%}] over {change.n} windows"
        checks.append(Check(mode, "perplexity", bool(change.point <= budget), f"{detail}, budget {budget:.1%}"))
    return tuple(checks)


def retrieval_checks(rows: Sequence[Row], arms: Mapping[Mode, Configuration]) -> tuple[Check, ...]:
    """One check per evicting mode and test: it must answer nearly all placements that dense decoding answers.

    Where dense decoding answers none nothing can be said, and the check counts as skipped.
    """
    right = Counter((row["test"], row["label"], row["prompt_id"]) for row in rows if row["outcome"] == "right")
    checks = []
    for mode in (Mode.KV, Mode.BOTH):
        for name in RETRIEVAL:
            dense = {prompt for test, label, prompt in right if (test, label) == (name, arms[Mode.DENSE].label)}
            own = {prompt for test, label, prompt in right if (test, label) == (name, arms[mode].label)}
            kept = len(dense & own)
            detail = f"{kept} of the {len(dense)} placements that dense decoding answers"
            passed = bool(kept >= LEAST_ANSWERED * len(dense)) if dense else None
            checks.append(Check(mode, name, passed, detail if dense else "skipped: dense decoding answers none"))
    return tuple(checks)


def _rows(task: Iterable[Row], say: Callable[[str], None]) -> list[Row]:
    """The rows of a task; its progress messages are said."""
    rows = []
    for row in task:
        if "doing" in row and "progress" in row:
            say(str(row["doing"]))
        else:
            rows.append(row)
    return rows
