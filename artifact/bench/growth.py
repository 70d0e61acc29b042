"""How time and memory of a run grow with context, with placements and with cells already done: a table for the docs.

    python -m artifact.bench.growth > docs/growth.md        (quarter of an hour; --smallest: minutes)

Each line is one cell of the kind that claims are made of, in a fresh process and without any prefill kept from before.
"""

from __future__ import annotations

import os
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from artifact import campaign, profiles
from artifact.account import K_TOKENS
from artifact.embedded import data_folder
from artifact.measure.configuration import Configuration
from artifact.records import Cell, Run
from artifact.samples import CellId

CONTEXT, PLACEMENTS, WINDOWS = 1792, 4, 2  # 1x; 4x lies just inside the embedded model's window of 8K
SCALES = (1, 2, 4)
CELLS_DONE = (0, 1000, 4000)
CLAIM = "crossover"  # whose source the cells are hashed with
STEPS = 20


@dataclass(frozen=True)
class Line:
    """One measured cell: what it was, seconds and largest resident bytes."""

    kind: str
    context: int
    placements: int
    seconds: float
    peak_bytes: int

    def markdown(self) -> str:
        asked = str(self.placements) if self.placements else "-"
        cost = f"{self.seconds:.1f} | {self.peak_bytes / 1e9:.2f}"
        return f"| {self.kind} | {self.context / K_TOKENS:.2f}K | {asked} | {cost} |"


def cells(run: Run, scales: tuple[int, ...] = SCALES) -> Iterator[tuple[str, int, int, Cell]]:
    """(kind, context, placements, cell) at every scale: contexts first, then placements at the shortest context."""
    from artifact.measure.cells import member, request
    from artifact.measure.quality_cells import answer_cell, profile_params, prompts_of

    arms = [Configuration(), Configuration(r_kv=0.3, method="snapkv"), Configuration(r_p=0.7)]
    for scale in scales:
        n = scale * CONTEXT
        group = [member(n), member(n, 0.5), member(n, 1.0, 0.3), member(n, 0.5, 0.3)]
        yield (
            "timing",
            n,
            0,
            Cell(CLAIM, f"timing-{n}", "artifact.measure.cells:decode", request(run.profile, [group], STEPS, n)),
        )
        windows = {**profile_params(run.profile), "arms": [arm.record() for arm in arms], "context": n, "scored": 64}
        windows |= {"windows": WINDOWS, "chosen": list(range(WINDOWS))}
        yield "perplexity", n, 0, Cell(CLAIM, f"windows-{n}", "artifact.measure.quality_cells:scored", windows)
        asked = [prompts_of("multikey", n, PLACEMENTS)]
        yield "retrieval", n, PLACEMENTS, answer_cell(run, CLAIM, f"answers-{n}", asked, arms)
    for scale in scales[1:]:
        count = scale * PLACEMENTS
        asked = [prompts_of("multikey", CONTEXT, count)]
        yield "retrieval", CONTEXT, count, answer_cell(run, CLAIM, f"placements-{count}", asked, arms)


def measured(run: Run, scales: tuple[int, ...]) -> Iterator[Line]:
    """Every cell once. RuntimeError when one fails: a table with a hole would say nothing."""
    for kind, context, placements, cell in cells(run, scales):
        result = campaign.run_local(cell, run.profile, run)
        if result.status != "ok":
            raise RuntimeError(f"{cell.key}: {result.error}")
        yield Line(kind, context, placements, result.seconds, result.peak_bytes)


def opening(folder: Path, done: int) -> tuple[float, float]:
    """(seconds, bytes of memory) that opening a run takes when `done` cells of 50 rows lie in it."""
    profile = profiles.Profile("embedded", "none", "cpu", "float32", None, 1)
    with Run(folder, profile) as run:
        rows = [{"ms": [20.0] * 50, "context": i} for i in range(50)]
        for number in range(done):
            closing = {"status": "ok", "sources": "", "depends": "", "seconds": 1.0}
            run.log.append(CellId(CLAIM, f"cell-{number}", 0, profile.name), rows, closing)
    tracemalloc.start()
    begin = time.perf_counter()
    with Run(folder, profile):
        seconds = time.perf_counter() - begin
        held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return seconds, float(held)


def own_data_folder(scratch: Path) -> None:
    """A data folder that holds the model and its conversion, and no prefill: what a first run finds."""
    real = data_folder()
    for part in real.iterdir():
        if part.name != "prepared":
            (scratch / part.name).symlink_to(part.resolve())
    os.environ["ARTIFACT_DATA"] = str(scratch)


@click.command()
@click.option("--smallest", is_flag=True, help="Only 1x, to see that it works.")
def main(smallest: bool) -> None:
    """Print the table as Markdown."""
    scales = SCALES[:1] if smallest else SCALES
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as data:
        own_data_folder(Path(data))
        with Run(Path(scratch) / "run", profiles.choose("embedded")) as run:
            click.echo("# How a run grows\n\nMade by `python -m artifact.bench.growth` on")
            click.echo(f"{run.profile.threads} threads. One cell a line, in a fresh process that finds no prefill.\n")
            click.echo("| cell | context | placements | seconds | peak memory, GB |\n|---|---|---|---|---|")
            for line in measured(run, scales):
                click.echo(line.markdown())
        click.echo("\n| cells already done | seconds to open the run | memory held, MB |\n|---|---|---|")
        for done in CELLS_DONE[:1] if smallest else CELLS_DONE:
            seconds, held = opening(Path(scratch) / f"done-{done}", done)
            click.echo(f"| {done:,} | {seconds:.2f} | {held / 1e6:.2f} |")


if __name__ == "__main__":
    main()
