"""`artifact gate --model PATH|SHAPE`: measure which mode is fastest at which length here, and write it as a table.

gate.json is what `Gate.load` and `artifact generate` read, gate.png shows it. The last line of standard output is one
compact JSON object with the same numbers as the lines above it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from artifact.account import K_TOKENS
from artifact.errors import UserError

if TYPE_CHECKING:
    from artifact.deploy.gate import Check, Gate, Table
    from artifact.profiles import Profile

NAMES = ("embedded", "gpu", "paper")
ANSWERS = 2000
SHORTEST_CONTEXT = 512
QUALITY_CONTEXT = 2048


@click.command("gate")
@click.option("--model", metavar="PATH|SHAPE", help="A directory, a GGUF file or known dimensions; default: profile's.")
@click.option("--profile", type=click.Choice(NAMES), help="embedded (CPU), gpu or paper; default by machine.")
@click.option("--r-p", type=float, default=0.7, show_default=True, help="Projection keep ratio.")
@click.option("--r-kv", type=float, default=0.3, show_default=True, help="KV keep ratio.")
@click.option("--ppl-budget", type=float, default=0.164, show_default=True, help="Share of dense PPL a mode may add.")
@click.option("--windows", type=click.IntRange(min=2), default=4, show_default=True, help="Text windows scored.")
@click.option("--placements", type=click.IntRange(min=0), default=8, show_default=True, help="Prompts a test; 0: none.")
@click.option("--skip-quality", is_flag=True, help="Admit every mode untested; the table says so.")
@click.option("--context", "contexts", multiple=True, help="Length like 4K; repeat. Default: doublings to the window.")
@click.option("--steps", type=click.IntRange(min=4), default=30, show_default=True, help="Timed steps per mode.")
@click.option("--text", metavar="FILE", help="A text file instead of the default text.")
@click.option("--out", metavar="FOLDER", help="Where gate.json and gate.png go; default: the data folder.")
@click.option("--json", "as_json", is_flag=True, help="Only the JSON line on standard output.")
def command(
    model: str | None,
    profile: str | None,
    r_p: float,
    r_kv: float,
    ppl_budget: float,
    windows: int,
    placements: int,
    skip_quality: bool,
    contexts: tuple[str, ...],
    steps: int,
    text: str | None,
    out: str | None,
    as_json: bool,
) -> int:
    """Time dense, both branches and both together, apply quality tests, and write the lookup table of the fastest."""
    from artifact import profiles
    from artifact.checks import in_range
    from artifact.deploy import gate_figure
    from artifact.deploy.gate import Gate, write_table

    for name, value in (("--r-p", r_p), ("--r-kv", r_kv)):
        if in_range(name, value, 0, 1) == 1:
            raise UserError(f"{name} is 1, which leaves its branch nothing to skip; give a ratio below 1")
    chosen = profiles.choose(profile, model, text)
    profiles.check_model(chosen)
    if placements % 4:
        raise UserError(f"--placements is {placements}; a multi-key prompt hides four codes, give a multiple of 4")
    table = measured(chosen, (r_p, r_kv), contexts, steps, ppl_budget, windows, -1 if skip_quality else placements)
    folder = Path(out) if out else default_folder(table.model)
    write_table(folder / "gate.json", table)
    gate = Gate(table)
    gate_figure.draw(gate, folder / "gate.png")
    if not as_json:
        click.echo(card(gate))
        click.echo(f"wrote {folder / 'gate.json'} and {folder / 'gate.png'}")
    click.echo(json.dumps(table.record(), sort_keys=True, separators=(",", ":")))
    return 0


def default_folder(identity: str) -> Path:
    """Where the table of a model lies when no folder was named."""
    from artifact.embedded import data_folder

    return data_folder() / "gates" / hashlib.sha256(identity.encode()).hexdigest()[:16]


def measured(
    profile: Profile,
    ratios: tuple[float, float],
    contexts: Sequence[str],
    steps: int,
    budget: float,
    windows: int,
    placements: int,
) -> Table:
    """Measure costs and admissibility. placements below 0 skip all quality tests."""
    from artifact.deploy.gate import Table, current_device, version
    from artifact.deploy.gate_costs import step_times
    from artifact.measure import gate_cells
    from artifact.measure.cells import is_name

    lengths, note = lengths_for(profile, ratios, contexts, steps)
    request = gate_cells.gate_request(profile, ratios, lengths, steps, lengths[-1], note)
    if note:
        say(note)
    rows = []
    for row in gate_cells.measure(request):
        if "progress" in row:
            say(str(row["doing"]).rpartition(", ")[0] or str(row["doing"]))
        else:
            rows.append(row)
    stepped = [row for row in rows if row["kind"] == gate_cells.STEP]
    measured_at, step_ms = step_times(stepped)
    once = {row["context"]: median(row["once_ms"]) for row in rows if row["kind"] == gate_cells.SELECTION}
    first = stepped[0]
    untested = "synthetic weights have no quality" if is_name(profile.model) else ""
    untested = untested or ("--skip-quality" if placements < 0 else "")
    return Table(
        version=version(),
        model=first["identity"],
        model_name=Path(profile.model).name,
        device=current_device(profile.device),
        dtype=profile.dtype,
        r_p=ratios[0],
        r_kv=ratios[1],
        window_tokens=int(first["shape"]["window"]),
        contexts=tuple(measured_at),
        step_ms={mode: tuple(round(ms, 4) for ms in times) for mode, times in step_ms.items()},
        selection_ms=tuple(round(once[n], 4) for n in measured_at),
        checks=_checks(profile, ratios, lengths[-1], budget, windows, placements, untested),
        steps=steps,
        text=first["text"],
    )


def _checks(
    profile: Profile, ratios: tuple[float, float], longest: int, budget: float, windows: int, placements: int, why: str
) -> tuple[Check, ...]:
    from artifact.deploy import gate_quality
    from artifact.measure.quality import Protocol

    if why:
        return gate_quality.skipped(why)
    arms = gate_quality.configurations(*ratios)
    protocol = Protocol(min(QUALITY_CONTEXT, longest), 128, windows)
    return gate_quality.measure(profile, arms, protocol, budget, placements, say)


def lengths_for(
    profile: Profile, ratios: tuple[float, float], asked: Sequence[str], steps: int
) -> tuple[list[int], str]:
    """Contexts to measure, multiples of the grid that leave room for the steps, and what was cut to fit the device."""
    from artifact.claim import NotRun
    from artifact.engine.prepare import grid
    from artifact.measure.crossing_cells import fitting_context, model_shape
    from artifact.measure.gate_cells import group_at
    from artifact.predict import contexts_from

    require_memory(profile)
    try:
        fit = fitting_context(profile, steps, lambda n: [group_at(n, *ratios)])
    except NotRun as reason:
        raise UserError(str(reason)) from None
    if asked:
        wanted = sorted({grid(n) for n in contexts_from(asked, model_shape(profile))})
        if wanted[-1] > fit.tokens:
            raise UserError(f"context {wanted[-1]} leaves no room for {steps} steps; {fit.tokens} is the longest here")
    else:
        doubled = [SHORTEST_CONTEXT << i for i in range(30) if SHORTEST_CONTEXT << i <= 0.75 * fit.tokens]
        wanted = [*doubled, fit.tokens]
    if len(wanted) < 2:
        raise UserError(f"one length, {wanted[0]} tokens, says nothing about contexts; give at least two")
    return wanted, fit.note


def require_memory(profile: Profile) -> None:
    """Raise UserError when synthetic weights of the named dimensions cannot be held by this machine's memory."""
    import psutil

    from artifact.engine.memory_plan import weight_bytes
    from artifact.measure.cells import is_name
    from artifact.shapes import known_shape

    if profile.device == "cpu" and is_name(profile.model):
        need, free = weight_bytes(known_shape(profile.model), 4), psutil.virtual_memory().available
        if need > 0.8 * free:
            raise UserError(
                f"{profile.model} takes {need / 1e9:.0f} GB in float32, {free / 1e9:.0f} GB are free; "
                "use a GPU or a smaller model"
            )


_last_said = ""


def say(doing: str) -> None:
    """One line of progress on standard error, once."""
    global _last_said
    if doing != _last_said:
        click.echo(doing, err=True)
    _last_said = doing


def card(gate: Gate) -> str:
    """Step times, what was admitted and why, and some answers."""
    from tabulate import tabulate

    from artifact.deploy.gate import MODES

    table = gate.table
    headers = ["context", *(f"{mode.value} ms" for mode in MODES), "selection ms", "fastest for 32 / 256 new tokens"]
    lines = []
    for i, n in enumerate(table.contexts):
        fits = [m for m in (32, 256) if n + m <= table.window_tokens]
        answers = " / ".join(gate.choose(n, m).mode.value for m in fits)
        times = [f"{table.step_ms[mode][i]:.2f}" for mode in MODES]
        lines.append([f"{n / K_TOKENS:.4g}K", *times, f"{table.selection_ms[i]:.1f}", answers])
    shown = [f"{table.model_name} on {table.device}, {table.dtype}; keep {table.r_p:.0%} / {table.r_kv:.0%}"]
    shown += [tabulate(lines, headers, disable_numparse=True, stralign="right"), "admissibility:"]
    for check in table.checks:
        verdict = {True: "passed", False: "FAILED", None: "not tested"}[check.passed]
        shown.append(f"  {check.mode.value:10s} {check.name:10s} {verdict}: {check.detail}")
    admitted = ", ".join(mode.value for mode in gate.modes)
    return "\n".join([*shown, f"admitted: {admitted}; an answer takes {answer_us(gate):.1f} microseconds"])


def answer_us(gate: Gate) -> float:
    """Microseconds that one answer takes, measured now."""
    longest = gate.table.window_tokens - 64
    begin = time.perf_counter()
    for i in range(ANSWERS):
        gate.choose(1 + i * 7919 % longest, 64)
    return (time.perf_counter() - begin) / ANSWERS * 1e6
