"""What a claim is: predicates with acceptance regions, judged from stored rows. One claim is one file of `claims/`.

A claim file defines `CLAIM`, `measure(run)` and `judge(rows, profile)` and ends with

    if __name__ == "__main__":
        raise SystemExit(run_as_script(__file__))

so that `python claims/NAME.py --quick` works alone, from any directory; the line `sys.path.insert(0, ...)` above its
imports makes that possible without an installation. Verification itself is in `artifact.verify`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from artifact.errors import UserError
from artifact.profiles import Profile
from artifact.stats import Interval, Region, Verdict, judge

if TYPE_CHECKING:
    from artifact.records import Run

__all__ = [
    "Claim",
    "Finding",
    "Interval",
    "NotRun",
    "Predicate",
    "Region",
    "Verdict",
    "find",
    "left_out",
    "load",
    "names",
    "not_run",
]

ROOT = Path(__file__).resolve().parent.parent
PAPERS = ("crossover", "sats", "catekv", "spark")
Row = dict[str, Any]


class NotRun(Exception):
    """Raised by `measure` when this machine or profile cannot run the claim; the message is the reason.

    `yours`: what is missing is something only the user can bring, such as a second checkpoint. Such a claim is reported
    and does not make a run of other claims incomplete.
    """

    def __init__(self, reason: str, yours: bool = False) -> None:
        super().__init__(reason)
        self.yours = yours


@dataclass(frozen=True)
class Predicate:
    """One statement of a paper with its acceptance region; asserted in the named profiles, observed in the others."""

    name: str
    statement: str
    place: str
    region: Region
    asserted_in: frozenset[str]
    paper_value: str = ""


@dataclass(frozen=True)
class Finding:
    """A predicate met with a measurement. `extra` holds figures printed beside it, never judged."""

    predicate: Predicate
    interval: Interval | None
    verdict: Verdict
    note: str = ""
    extra: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """The registry entry of one claim. `minutes` is the expected time per profile; `tables` name what it fills."""

    name: str
    title: str
    paper: str
    place: str
    needs: str
    minutes: Mapping[str, str]
    tables: tuple[str, ...]
    predicates: tuple[Predicate, ...]


@dataclass(frozen=True)
class ClaimModule:
    """A loaded claim file."""

    claim: Claim
    measure: Callable[[Run], None]
    judge: Callable[[list[Row], Profile], list[Finding]]
    source: Path


def find(
    predicate: Predicate,
    interval: Interval | None,
    profile: Profile,
    note: str = "",
    extra: Mapping[str, float | str] | None = None,
) -> Finding:
    """Judge the interval where the predicate is asserted; elsewhere it is only observed. No interval: not run."""
    if interval is None:
        verdict = Verdict.NOT_RUN
    elif profile.name not in predicate.asserted_in:
        verdict = Verdict.OBSERVED
    else:
        verdict = judge(interval, predicate.region)
    return Finding(predicate, interval, verdict, note, dict(extra or {}))


def not_run(predicate: Predicate, reason: str) -> Finding:
    """A predicate that could not be measured here, with the reason."""
    return Finding(predicate, None, Verdict.NOT_RUN, reason)


def left_out(predicate: Predicate, reason: str) -> Finding:
    """A predicate that the run did not set out to measure: it is shown, and counts neither for nor against."""
    return Finding(predicate, None, Verdict.OBSERVED, reason)


def folder() -> Path:
    """Where the claim files lie: the package that is imported, so that an installed copy finds its own."""
    package = importlib.import_module("claims")
    return Path(next(iter(package.__path__)))


def names() -> list[str]:
    """Names of all claims: the files of `claims/` that do not start with an underscore, sorted."""
    return sorted(path.stem for path in folder().glob("*.py") if not path.name.startswith("_"))


def load(name: str) -> ClaimModule:
    """Import one claim by name.

    UserError for a name that no file has; TypeError for a file that breaks the contract.
    """
    known = names()
    if name not in known:
        raise UserError(f"no claim is called {name!r}; `artifact list` shows them: {', '.join(known) or 'none'}")
    return check(importlib.import_module(f"claims.{name}"))


def check(module: ModuleType) -> ClaimModule:
    """The contract of a claim file: CLAIM, measure, judge, one name per predicate, a reason per region."""
    claim = getattr(module, "CLAIM", None)
    measure, judge_rows = getattr(module, "measure", None), getattr(module, "judge", None)
    if not isinstance(claim, Claim) or not callable(measure) or not callable(judge_rows) or module.__file__ is None:
        raise TypeError(f"{module.__name__} must define CLAIM, measure(run) and judge(rows, profile)")
    if claim.paper not in PAPERS:
        raise TypeError(f"claim {claim.name}: paper {claim.paper!r} is not one of {', '.join(PAPERS)}")
    predicate_names = [predicate.name for predicate in claim.predicates]
    if not predicate_names or len(set(predicate_names)) != len(predicate_names):
        raise TypeError(f"claim {claim.name} needs predicates with distinct names, has {predicate_names}")
    if unexplained := [p.name for p in claim.predicates if not p.region.reason.strip()]:
        raise TypeError(f"claim {claim.name}: no reason is given for the region of {', '.join(unexplained)}")
    return ClaimModule(claim, measure, judge_rows, Path(module.__file__))


def run_as_script(file: str) -> int:
    """Verify the claim defined in `file` with the options of `artifact verify`; returns the exit code."""
    from artifact.cli import main

    return main(["verify", Path(file).stem, *sys.argv[1:]])
