"""The measuring task of the threshold comparison: both allocations of one keep ratio on the shared windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from artifact.measure import quality, quality_cells
from artifact.measure.configuration import Configuration
from artifact.measure.quality import Protocol
from artifact.measure.workbench import open_workbench, prefilled
from artifact.projection import teal_greedy
from artifact.records import Cell, Run

Row = dict[str, Any]


def score_both(run: Run, claim: str, protocol: Protocol, keeps: Sequence[float]) -> list[Row]:
    """Rows of every window under uniform and greedy thresholds, one process per keep ratio."""
    common = {**quality_cells.profile_params(run.profile), "windows": protocol.windows}
    common |= {"context": protocol.context_tokens, "scored": protocol.scored_tokens}
    task = "artifact.measure.greedy_cells:scored"
    cells = [Cell(claim, f"keep-{keep:g}", task, {**common, "keep": keep}, timeout_s=3600.0) for keep in keeps]
    return run.measure(cells)


def scored(params: Row) -> Iterator[Row]:
    """Task: allocate greedily on calibration tokens, then score every window under both allocations."""
    keep = float(params["keep"])
    yield {"progress": 0.0, "doing": f"allocating thresholds for {keep:.0%} keep"}
    bench = open_workbench(params["model"], params["text"], params["device"], params["dtype"])
    greedy = teal_greedy.allocate(bench.weights, bench.calibration, bench.calibration_tokens, keep)
    protocol = Protocol(params["context"], params["scored"], params["windows"])
    text = bench.evaluation_text
    cut = quality.windows(bench.tokenizer, text.text, protocol, text.name)
    quality.check_calibration(bench.calibration, cut, bench.calibration_tokens)
    arm = Configuration(r_p=keep)
    for index, window in enumerate(cut.tokens):
        yield {"progress": index / protocol.windows, "doing": f"window {index + 1} of {protocol.windows}"}
        prompt = prefilled(bench, window[: protocol.context_tokens], "prefill")
        for kind, calibration in (("uniform", bench.calibration), ("greedy", greedy)):
            row = quality.score(bench.weights, calibration, prompt.cache, prompt.queries, window, arm)
            yield row | {
                "label": f"{kind}{100 * keep:g}",
                "kind": "window",
                "window": index,
                "protocol": cut.hash,
                "allocated": teal_greedy.describe(greedy) if kind == "greedy" else {},
                "text": bench.text_label,
            }
