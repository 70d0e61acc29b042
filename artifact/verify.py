"""Verifies claims in one run folder: measure, judge, write results. One claim's failure never stops the others.

Results are derived from stored rows alone (`derive`), so verdicts and tables can be made again from a folder.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from artifact import claim as claims
from artifact import results_check
from artifact.claim import ClaimModule, Finding, NotRun
from artifact.errors import UserError
from artifact.profiles import Profile
from artifact.records import SCHEMA, CellError, Run, errors_of, read_json, read_options, rows_of, write_json
from artifact.samples import SampleLog
from artifact.stats import Interval, Region, Verdict

T = TypeVar("T")
# Worst first: an error says nothing about the paper, a contradiction does, and both outrank what is merely missing.
ORDER = (Verdict.ERROR, Verdict.CONTRADICTED, Verdict.INCONCLUSIVE, Verdict.NOT_RUN)
EXIT_OK, EXIT_CONTRADICTED, EXIT_USAGE, EXIT_INCOMPLETE, EXIT_ERROR = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Outcome:
    """What one claim came to.

    `usage` marks an error that is the user's to mend, `yours` a claim not run for want of something that only the user
    can bring; minutes and memory are of its cells.
    """

    name: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    reason: str = ""
    usage: bool = False
    seconds: float = 0.0
    peak_bytes: int = 0
    cells: int = 0
    yours: bool = False


def verify(run: Run, names: Sequence[str], on_done: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Measure and judge each claim; results.json is rewritten after each of them."""
    outcomes: list[Outcome] = []
    for name in names:
        outcome = verify_one(run, name)
        outcomes.append(outcome)
        merge_results(run.path, run.profile, run.quick, [outcome])
        if on_done is not None:
            on_done(outcome)
    return outcomes


def verify_one(run: Run, name: str) -> Outcome:
    """One claim, measured and judged; whatever it raises becomes its ERROR verdict with the traceback kept in the
    folder.
    """

    def measure() -> Outcome | None:
        module = claims.load(name)
        run.start_claim(name, module.source)
        try:
            module.measure(run)
        except NotRun as reason:
            return replace(not_run(name, str(reason)), yours=reason.yours)
        return None

    stopped, fault = isolated(measure, run.path, name)
    if stopped is not None:
        return stopped
    if fault is None:
        return judge_claim(run.log, name, run.profile, run.path)
    # What was measured before the fault is still shown, but the claim stays an error.
    outcome = judge_claim(run.log, name, run.profile, None)
    return replace(outcome, verdict=Verdict.ERROR, reason=fault.reason, usage=fault.usage)


@dataclass(frozen=True)
class Fault:
    """Why a claim's own code stopped: one line, and whether the user's input is the cause."""

    reason: str
    usage: bool


def isolated(action: Callable[[], T], folder: Path | None, name: str) -> tuple[T | None, Fault | None]:
    """The result of a claim's own code, or the fault that it raised; a fault of ours leaves its traceback in the
    folder.
    """
    try:
        return action(), None
    except (UserError, CellError) as error:
        return None, Fault(str(error), getattr(error, "usage", True))
    except Exception as error:  # noqa: BLE001 - any claim may fail in any way; the others must go on
        return None, Fault(keep_traceback(folder, name, error), False)


def not_run(name: str, reason: str) -> Outcome:
    """A claim that this machine or profile cannot measure, or that left no rows."""
    module, _ = isolated(lambda: claims.load(name), None, name)
    predicates = module.claim.predicates if module is not None else ()
    return Outcome(name, Verdict.NOT_RUN, tuple(claims.not_run(predicate, reason) for predicate in predicates), reason)


def judge_claim(log: SampleLog, name: str, profile: Profile, folder: Path | None = None) -> Outcome:
    """Judge a claim from its stored rows. A failed cell, or an exception of the judge, is an ERROR with its reason."""
    groups = log.groups(name)
    totals: dict[str, Any] = {
        "seconds": math.fsum(float(group.closing.get("seconds", 0.0)) for group in groups),
        "peak_bytes": max((int(group.closing.get("peak_bytes", 0)) for group in groups), default=0),
        "cells": len(groups),
    }
    failed = errors_of(log, name)
    rows = rows_of(log, name)
    if not rows and not failed:
        return not_run(name, "no samples")

    def judge() -> tuple[Finding, ...]:
        module = claims.load(name)
        return tuple(_complete(module, module.judge(rows, profile), profile))

    findings, fault = isolated(judge, folder, name)
    if failed:
        # A judge that stumbles over missing rows only repeats that a cell failed: the cell's reason is the one to
        # report.
        fault = Fault(failed[0][0], all(usage for _, usage in failed))
    if fault is not None:
        return Outcome(name, Verdict.ERROR, findings or (), fault.reason, fault.usage, **totals)
    return Outcome(name, summarise(findings or ()), findings or (), **totals)


def summarise(findings: Sequence[Finding]) -> Verdict:
    """The worst asserted verdict; REPRODUCED when all are; OBSERVED when nothing is asserted in this profile."""
    verdicts = {finding.verdict for finding in findings}
    for verdict in ORDER:
        if verdict in verdicts:
            return verdict
    return Verdict.REPRODUCED if Verdict.REPRODUCED in verdicts else Verdict.OBSERVED


def _complete(module: ClaimModule, findings: Sequence[Finding], profile: Profile) -> list[Finding]:
    """The findings, with a NOT_RUN one for every asserted predicate that the judge was silent about."""
    own = {predicate.name for predicate in module.claim.predicates}
    found = {finding.predicate.name for finding in findings}
    if strangers := sorted(found - own):
        raise ValueError(
            f"judge of {module.claim.name} found predicates that the claim does not list: {', '.join(strangers)}"
        )
    silent = [p for p in module.claim.predicates if p.name not in found and profile.name in p.asserted_in]
    return [_asserted(f, profile) for f in findings] + [claims.not_run(p, "no rows to judge it by") for p in silent]


def _asserted(finding: Finding, profile: Profile) -> Finding:
    """A predicate that could not be measured where it is not asserted does not count against the claim."""
    if finding.verdict is Verdict.NOT_RUN and profile.name not in finding.predicate.asserted_in:
        return Finding(finding.predicate, None, Verdict.OBSERVED, finding.note or "not measured here", finding.extra)
    return finding


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 only when something was asserted and all of it reproduced; error 4 before usage 2, contradicted 1, incomplete
    3. A claim that waits for something of the user's counts for nothing, unless it is all there is.
    """
    verdicts = [outcome.verdict for outcome in outcomes if not outcome.yours]
    errors = [outcome for outcome in outcomes if outcome.verdict is Verdict.ERROR]
    if errors:
        return EXIT_USAGE if all(outcome.usage for outcome in errors) else EXIT_ERROR
    if Verdict.CONTRADICTED in verdicts:
        return EXIT_CONTRADICTED
    if Verdict.REPRODUCED not in verdicts or Verdict.INCONCLUSIVE in verdicts or Verdict.NOT_RUN in verdicts:
        return EXIT_INCOMPLETE
    return EXIT_OK


def derive(folder: Path) -> dict[str, Any]:
    """Judge every claim of a finished folder again from its samples, write results.json and return it."""
    profile, quick = read_options(folder)
    log = SampleLog(folder / "samples.jsonl")
    known = [name for name in log.claims() if name in claims.names()]
    return merge_results(folder, profile, quick, [judge_claim(log, name, profile) for name in known])


def read_results(folder: Path) -> dict[str, Any]:
    """results.json of a run. UserError when it is missing, damaged or newer than this version."""
    results = read_json(folder / "results.json")
    if fault := results_check.fault(results):
        raise UserError(f"{folder / 'results.json'} {fault}; delete it, `artifact tables {folder}` writes it again")
    return results


def merge_results(folder: Path, profile: Profile, quick: bool, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Replace these claims in results.json, keep the others."""
    path = folder / "results.json"
    kept = read_results(folder)["claims"] if path.exists() else {}
    results = {
        "schema": SCHEMA,
        "profile": profile.name,
        "model": Path(profile.model).name,
        "quick": quick,
        "claims": {**kept, **{outcome.name: outcome_json(outcome) for outcome in outcomes}},
    }
    write_json(path, results)
    return results


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The record of one claim: non-finite numbers become null, so that the file is strict JSON."""
    return {
        "verdict": outcome.verdict.value,
        "reason": outcome.reason,
        "usage": outcome.usage,
        "minutes": round(outcome.seconds / 60, 2),
        "peak_bytes": outcome.peak_bytes,
        "cells": outcome.cells,
        "findings": [_finding_json(finding) for finding in outcome.findings],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    predicate = finding.predicate
    return {
        "predicate": predicate.name,
        "statement": predicate.statement,
        "place": predicate.place,
        "paper_value": predicate.paper_value,
        "region": _region_json(predicate.region),
        "interval": _interval_json(finding.interval),
        "verdict": finding.verdict.value,
        "note": finding.note,
        "extra": {key: _number(value) for key, value in finding.extra.items()},
    }


def _interval_json(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    numbers = {name: _number(getattr(interval, name)) for name in ("point", "low", "high")}
    return numbers | {"n": interval.n, "method": interval.method, "unit": interval.unit}


def _region_json(region: Region) -> dict[str, Any]:
    return {"low": _number(region.low), "high": _number(region.high), "reason": region.reason, "unit": region.unit}


def _number(value: Any) -> Any:
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    return float(value) if math.isfinite(float(value)) else None


def keep_traceback(folder: Path | None, name: str, error: BaseException) -> str:
    """Save the traceback as `errors/NAME.txt` of the run and return the one-line reason."""
    from artifact.portable import portable

    first = (str(error).strip() or "no message").splitlines()[0]
    if folder is not None:
        target = folder / "errors" / f"{name}.txt"
        target.parent.mkdir(exist_ok=True)
        target.write_text(portable("".join(traceback.format_exception(error))), encoding="utf-8")
    return f"{type(error).__name__}: {first}"
