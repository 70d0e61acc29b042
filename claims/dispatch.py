"""A gate calibrated on measured latency serves a request mix at least as fast as any fixed mode (crossover, section
5.4, Table 5).

The paper prices a mix of chat, long-document questions and agent loops: the gate reaches 1.40x over dense decoding on
A100 and 1.72x on RTX A6000, always composing 1.40x and 1.69x, so nearly all of the gain is composition. Measured here:
step times of all modes and the one-time selection, a process per block; every request of the mix is then priced
along its generated sequence, with the gate calibrated on other blocks than the one that prices it. The recorded runs
that ship with the artifact are priced by the same rules. ARTIFACT_REQUEST_MIX=FILE takes another mix.

    python claims/dispatch.py [--quick]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, Predicate, find, not_run, run_as_script
from artifact.deploy import dispatch
from artifact.deploy.dispatch import Times
from artifact.deploy.mix import DEFAULT, Mix, from_record, load
from artifact.profiles import NAMES, Profile
from artifact.stats import Region, block_interval
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "dispatch"
PAPER = figures("crossover")
VARIABLE = "ARTIFACT_REQUEST_MIX"
BLOCKS, QUICK_BLOCKS = 7, 3
EVERYWHERE = frozenset(NAMES)
RECORDED = " (recorded runs)"
RECORDED_CLAIMS = ("speedup_bounds", "selection_cost")
AT_LEAST_AS_GOOD = Region(
    0.99, None, "1% for noise between the blocks that calibrate the gate and the one that prices it", "x"
)
MOST = Region(0.5, None, "most of the gain is more than half of it")
SHOWN = Region(None, None, "speedups are judged only on the machine that they were published for", "x")


def _predicates(suffix: str) -> tuple[Predicate, ...]:
    gate, compose = (
        f"{PAPER[f'mix.{name}.a100'].printed}x (A100), {PAPER[f'mix.{name}.a6000'].printed}x (RTX A6000)"
        for name in ("gate", "compose")
    )
    return (
        Predicate(
            f"gate at least as good as every fixed policy{suffix}",
            "time of the cheapest fixed policy on the mix over that of the latency gate",
            "section 5.4, Table 5",
            AT_LEAST_AS_GOOD,
            EVERYWHERE,
            f"gate {gate}; compose {compose}",
        ),
        Predicate(
            f"most of the gain is composition{suffix}",
            "gain of always composing over the gain of the gate",
            "section 5.4, Table 5",
            MOST,
            EVERYWHERE,
            "nearly all",
        ),
        Predicate(
            f"speedup of the gate{suffix}",
            "time of dense decoding on the mix over that of the latency gate",
            "section 5.4, Table 5",
            SHOWN,
            frozenset(),
            gate,
        ),
    )


CLAIM = Claim(
    name=NAME,
    title="A gate calibrated on latency is at least as fast as any fixed mode on a request mix",
    paper="crossover",
    place="section 5.4, Table 5, Appendix I",
    needs="a model; 5 GB of memory (embedded) or a CUDA GPU (gpu)",
    minutes={"embedded": "2.5 (quick: 0.7)", "gpu": "6", "paper": "10"},
    tables=("table5",),
    predicates=(*_predicates(""), *_predicates(RECORDED)),
)


def measure(run: Run) -> None:
    """Store the mix and the recorded times, then time every mode and the selection, one process per block."""
    from artifact.measure.mode_sweep import cells

    _, record = load(os.environ.get(VARIABLE) or DEFAULT)
    run.record(NAME, "mix", [{"kind": "mix", "record": record}])
    run.record(NAME, "recorded", recorded_times())
    run.measure(cells(run, NAME, QUICK_BLOCKS if run.quick else BLOCKS))


def recorded_times() -> list[dict[str, Any]]:
    """Times of the recorded runs that hold step times of all modes and the selection's one-time cost."""
    from paper_tables.recorded import machines, recorded_rows

    found = []
    for machine in machines():
        rows = recorded_rows(machine, RECORDED_CLAIMS)
        stepped = [row for row in rows if row["claim"] == "speedup_bounds" and "ms" in row]
        selected = [row for row in rows if row["claim"] == "selection_cost" and "once_ms" in row]
        if not stepped or not selected:
            continue
        once = {n: median(ms for row in selected if row["context"] == n for ms in row["once_ms"])
                for n in {row["context"] for row in selected}}  # fmt: skip
        for block in sorted({row["block"] for row in stepped}):
            found.append(dispatch.times_row(machine, block, [r for r in stepped if r["block"] == block], once))
    return found or [{"kind": "none", "machine": ""}]


def gathered(rows: list[dict[str, Any]]) -> tuple[Mix | None, list[Times]]:
    """The mix and the times in stored rows: those of this run first, then one entry per recorded run."""
    records = [row["record"] for row in rows if row.get("kind") == "mix"]
    times = [row for row in rows if row.get("kind") == "times"]
    machines = sorted({row["machine"] for row in times})
    found = [dispatch.times_from([row for row in times if row["machine"] == machine]) for machine in machines]
    live = [row for row in rows if row.get("kind") in ("step", "selection")]
    if live:
        found.insert(0, dispatch.times_from([_live(live, block) for block in sorted({r["block"] for r in live})]))
    return (from_record(records[-1]) if records else None), found


def _live(rows: list[dict[str, Any]], block: int) -> dict[str, Any]:
    mine = [row for row in rows if row["block"] == block]
    once = {row["context"]: median(row["once_ms"]) for row in mine if row["kind"] == "selection"}
    return dispatch.times_row("", block, [row for row in mine if row["kind"] == "step"], once)


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Price the mix in every block of this run and of each recorded one; of several recorded runs the worst counts."""
    mix, times = gathered(rows)
    live = [one for one in times if not one.machine]
    recorded = [one for one in times if one.machine]
    named = {predicate.name: predicate for predicate in CLAIM.predicates}
    first, second = list(named)[:3], list(named)[3:]
    if mix is None:
        return [not_run(predicate, "no request mix was stored") for predicate in CLAIM.predicates]
    findings = _findings([named[name] for name in first], mix, live, profile, "no block was measured")
    return findings + _findings(
        [named[name] for name in second], mix, recorded, profile, "no recorded run holds step times and selection costs"
    )


def _findings(
    predicates: list[Predicate], mix: Mix, times: list[Times], profile: Profile, reason: str
) -> list[Finding]:
    best, most, gain = predicates
    if not times:
        return [not_run(predicate, reason) for predicate in predicates]
    made = []
    for one in times:
        decodes = dispatch.decodes_for(mix, one)
        totals = dispatch.priced(one, decodes)
        speedup = dispatch.speedups(totals)
        extra: dict[str, float | str] = {f"{name}, x": median(values) for name, values in speedup.items()}
        shares = dispatch.chosen(one, decodes)
        extra |= {f"gate chooses {mode.value}, share": share for mode, share in shares.items()}
        note = "; ".join(filter(None, [one.machine and f"{one.machine} (recorded)", mix.name]))
        made.append(
            [
                find(best, block_interval(dispatch.gate_over_best(totals), unit="x"), profile, note, extra),
                find(most, block_interval(dispatch.composition_share(totals)), profile, note),
                find(gain, block_interval(speedup[dispatch.LATENCY_GATE], unit="x"), profile, note, extra),
            ]
        )
    return [min(found, key=lambda finding: finding.interval.low if finding.interval else 0.0)
            for found in zip(*made, strict=True)]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
