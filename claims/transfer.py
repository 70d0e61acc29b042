"""The projection branch carries over to another checkpoint (crossover, section 4.4).

The paper: at 50% keep Mistral-7B-v0.3 decodes 1.71x faster on RTX A6000, as much as Llama-3.1-8B there. Measured here:
the projection branch of a second checkpoint, given by path, next to the profile's model in the same blocks; each
gain is judged against its own byte bound, since two sizes of model have two bounds. No second checkpoint: not run.

    ARTIFACT_SECOND_MODEL=PATH python claims/transfer.py [--quick]
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.account import Mode, Setting, step_bytes
from artifact.claim import Claim, Finding, NotRun, Predicate, find, not_run, run_as_script
from artifact.profiles import NAMES, Profile
from artifact.shapes import Shape
from artifact.stats import Region, block_interval, require_equal_arms
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "transfer"
PAPER = figures("crossover")
VARIABLE = "ARTIFACT_SECOND_MODEL"
COMMAND = f"{VARIABLE}=PATH artifact verify {NAME}"
R_P = 0.5
CONTEXT = 1024
BLOCKS, QUICK_BLOCKS = 7, 3
STEPS, QUICK_STEPS = 28, 12
EVERYWHERE = frozenset(NAMES)

CLAIM = Claim(
    name=NAME,
    title="The projection branch is as fast on another checkpoint",
    paper="crossover",
    place="section 4.4, Transfer",
    needs=f"a second checkpoint: {COMMAND}",
    minutes=dict.fromkeys(NAMES, "2, with a second checkpoint"),
    tables=(),
    predicates=(
        Predicate(
            "faster than dense",
            "speedup of the projection branch at 50% keep on the second checkpoint",
            "section 4.4",
            Region(1.0, None, "the branch carries over when it is faster there at all", "x"),
            EVERYWHERE,
            f"{PAPER['mistral.gain'].printed}x on RTX A6000",
        ),
        Predicate(
            "as large as on the first checkpoint",
            "share of its byte saving that the branch turns into time, second checkpoint over the first",
            "section 4.4",
            Region(0.8, 1.25, "as large: within a quarter, the spread of the paper's own shares of the bound", "x"),
            EVERYWHERE,
            "as large as that of Llama-3.1-8B on the same GPU",
        ),
    ),
)


def measure(run: Run) -> None:
    """Both checkpoints one after the other in every block. NotRun, with the command, when there is no second one."""
    from dataclasses import asdict, replace

    from artifact.measure.cells import member, request
    from artifact.measure.crossing_cells import model_shape
    from artifact.records import Cell

    second = os.environ.get(VARIABLE)
    if not second:
        raise NotRun(
            f"needs a second checkpoint; run `{COMMAND}` with a Hugging Face directory or GGUF file", yours=True
        )
    if run.profile.name != "gpu" and not Path(second).exists():
        raise NotRun(f"{VARIABLE} names {second}, which does not exist; run `{COMMAND}`")
    profiles = {"first": run.profile, "second": replace(run.profile, model=second)}
    shapes = [{"kind": "shape", "which": which, "shape": asdict(model_shape(p))} for which, p in profiles.items()]
    run.record(NAME, "shapes", shapes)
    steps = QUICK_STEPS if run.quick else STEPS
    for block in range(QUICK_BLOCKS if run.quick else BLOCKS):
        for which, profile in profiles.items():
            params = request(profile, [[member(CONTEXT), member(CONTEXT, R_P)]], steps, CONTEXT)
            run.measure([Cell(NAME, f"{which}-{block}", "artifact.measure.cells:decode", params, block)])


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Gains of the second checkpoint over blocks, and how they compare with the first one's."""
    faster, alike = CLAIM.predicates
    shapes = {row["which"]: Shape(**row["shape"]) for row in rows if row.get("kind") == "shape"}
    if set(shapes) != {"first", "second"}:
        return [not_run(predicate, f"no second checkpoint; run `{COMMAND}`") for predicate in CLAIM.predicates]
    gains = {which: block_gains(rows, which) for which in shapes}
    require_equal_arms(gains)
    shares = {which: [saved_share(gain, shapes[which]) for gain in gains[which]] for which in shapes}
    ratios = [b / a for a, b in zip(shares["first"], shares["second"], strict=True)]
    extra: dict[str, float | str] = {f"gain of the {which}": median(gain) for which, gain in gains.items()}
    extra |= {f"model, {which}": shape.name for which, shape in shapes.items()}
    return [
        find(faster, block_interval(gains["second"], unit="x"), profile, "", extra),
        find(alike, block_interval(ratios, unit="x"), profile),
    ]


def block_gains(rows: list[dict[str, Any]], which: str) -> list[float]:
    """Median over rounds of dense over projection step time, one per block of one checkpoint."""
    found = []
    for block in sorted({row["block"] for row in rows if row["cell"].startswith(f"{which}-")}):
        own = {row["mode"]: row["ms"] for row in rows if row["cell"] == f"{which}-{block}"}
        require_equal_arms(own)
        found.append(math.exp(median(math.log(a / b) for a, b in zip(own["dense"], own["projection"], strict=True))))
    return found


def saved_share(gain: float, shape: Shape) -> float:
    """Share of the step that was saved over the share that the bytes allow: 1 when a step runs at its byte bound."""
    setting = Setting(r_p=R_P, r_kv=1.0)
    allowed = 1 - step_bytes(shape, setting, CONTEXT, Mode.PROJECTION) / step_bytes(shape, setting, CONTEXT, Mode.DENSE)
    return (1 - 1 / gain) / allowed


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
