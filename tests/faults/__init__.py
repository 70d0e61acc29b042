"""Seeded faults: defects put into honest rows and into the engine, which must turn a claim away from `reproduced`.

One file per claim, named as the claim, none of it on a code path of the product. It holds

    PROFILE     the profile whose predicates are judged
    honest()    rows as the claim's cells store them where the paper's sentence holds
    FAULTS      functions that change such rows as a defect would; the docstring says which defect, and there are
                at least two
    UNEQUAL     optional, one of FAULTS: it loses a sample of one arm only, which must be an error

`artifact selftest` finds the files by their place and runs them all. Rows go through a real run folder and the judge of
`artifact verify`. Defects of the measuring cell itself are in `_engine`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifact.profiles import Profile
from artifact.records import Run
from artifact.stats import Verdict
from artifact.verify import Outcome, judge_claim

Row = dict[str, Any]
Change = Callable[[list[Row]], None]


@dataclass(frozen=True)
class Suite:
    """The seeded faults of one claim."""

    claim: str
    profile: Profile
    honest: Callable[[], list[Row]]
    faults: tuple[Change, ...]
    unequal: Change | None


@dataclass(frozen=True)
class Trial:
    """One fault, or the honest control where `fault` is empty, and what the judge said about it."""

    claim: str
    fault: str
    what: str
    verdict: Verdict
    noticed: str

    @property
    def as_it_must_be(self) -> bool:
        """A control is reproduced; a fault is anything but that, and never passes for merely observed."""
        if not self.fault:
            return self.verdict is Verdict.REPRODUCED
        return self.verdict in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE, Verdict.ERROR)


def names() -> list[str]:
    """Claims that have seeded faults: the files of this folder."""
    return sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("_"))


def suite(name: str) -> Suite:
    """The faults of one claim."""
    module = importlib.import_module(f"{__name__}.{name}")
    return Suite(name, module.PROFILE, module.honest, tuple(module.FAULTS), getattr(module, "UNEQUAL", None))


def suites() -> list[Suite]:
    """The faults of every claim that has some."""
    return [suite(name) for name in names()]


def each(change: Callable[[Row], None]) -> Change:
    """A fault that falls on every row alike."""

    @functools.wraps(change)
    def apply(rows: list[Row]) -> None:
        for row in rows:
            change(row)

    return apply


def judged(of: Suite, fault: Change | None = None) -> Outcome:
    """What `artifact verify` says about honest rows, or about rows with a fault in them."""
    rows = copy.deepcopy(of.honest())
    if fault is not None:
        fault(rows)
    with tempfile.TemporaryDirectory() as scratch, Run(Path(scratch) / "run", of.profile) as run:
        run.start_claim(of.claim, Path(__file__))
        for key, block in sorted({_cell(row) for row in rows}):
            run.record(of.claim, key, [row for row in rows if _cell(row) == (key, block)], block)
        return judge_claim(run.log, of.claim, of.profile)


def trials(of: Suite) -> list[Trial]:
    """The honest control of a claim, then each of its faults."""
    found = [_trial(of, "", "honest rows", judged(of))]
    return found + [_trial(of, fault.__name__, _first_line(fault), judged(of, fault)) for fault in of.faults]


def _trial(of: Suite, fault: str, what: str, outcome: Outcome) -> Trial:
    against = [f.predicate.name for f in outcome.findings if f.verdict is outcome.verdict]
    noticed = outcome.reason or ("" if outcome.verdict is Verdict.REPRODUCED else ", ".join(against))
    return Trial(of.claim, fault, what, outcome.verdict, noticed)


def _first_line(fault: Change) -> str:
    return (fault.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def _cell(row: Row) -> tuple[str, int]:
    return str(row.get("cell", "simulated")), int(row.get("block", 0))
