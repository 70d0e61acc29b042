"""Every figure of the crossover paper that follows from model dimensions, rebuilt and compared to its printed digit.

Sections 3 to 5, Table 1. Nothing is timed: byte counts, crossovers and bounds come from `artifact.account`, and each
must round to what the paper prints. Gains that the paper measured are held against their byte bounds. Under a second:

    python claims/byte_account.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, find, not_run, run_as_script
from artifact.profiles import NAMES, Profile
from artifact.stats import Interval, exact_interval
from claims._byte_checks import Check, all_checks, table1_row
from paper_tables.figures import transcript

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "byte_account"
CHECKS = all_checks()
OURS = ("Llama-3.1-70B", "SmolLM2-135M")  # rows of Table 1 for which the paper prints no crossover

CLAIM = Claim(
    name=NAME,
    title="The byte account gives every printed figure that follows from model dimensions",
    paper="crossover",
    place="Sections 3 to 5, Table 1",
    needs="nothing: no weights, no text, no GPU",
    minutes=dict.fromkeys(NAMES, "under 0.1"),
    tables=("table1",),
    predicates=tuple(check.predicate for check in CHECKS),
)


def figure_row(check: Check) -> dict[str, Any]:
    """The rebuilt figure as a row: a point, and the interval that the rounding of printed inputs leaves."""
    figure = check.figure()
    low, point, high = figure if isinstance(figure, tuple) else (figure, figure, figure)
    unit = check.predicate.region.unit
    return {"kind": "figure", "figure": check.predicate.name, "low": low, "point": point, "high": high, "unit": unit}


def measure(run: Run) -> None:
    """Compute all figures and the rows of Table 1 in this process."""
    run.record(NAME, "figures", [figure_row(check) for check in CHECKS])
    models = [entry["model"] for entry in transcript("crossover")["table1"]["rows"]]
    run.record(NAME, "table1", [table1_row(model) for model in (*models, *OURS)])


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """One finding per predicate, from the stored figures alone."""
    stored = {row["figure"]: row for row in rows if row.get("kind") == "figure"}
    findings = []
    for predicate in CLAIM.predicates:
        row = stored.get(predicate.name)
        if row is None:
            findings.append(not_run(predicate, "the run holds no such figure"))
        else:
            findings.append(find(predicate, _interval(row), profile))
    return findings


def _interval(row: dict[str, Any]) -> Interval:
    if row["low"] == row["high"]:
        return exact_interval(row["point"], row["unit"])
    return Interval(row["point"], row["low"], row["high"], 1, "range", row["unit"])


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
