"""The measuring task of weight formats: the same arms on the same windows, weights and cache stored in another format.

Thresholds are shared: calibrated once, in the profile's format, so that two rows differ by the format and nothing else.
Activations and sums are float32 whatever is stored, as in a decode step of ours, but for a dense prefill and attention,
which round what they read to the stored format; a library that rounds all activations would add to the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from artifact.engine import models
from artifact.measure.masked_cells import opened, windows_scored
from artifact.measure.masked_plan import Arm, Sizes, arm_of
from artifact.measure.quality_cells import profile_params
from artifact.records import Cell, Run

Row = dict[str, Any]
KIND = "format"  # of rows, apart from the windows that the profile's own format scored


def format_cell(run: Run, claim: str, sizes: Sizes, arms: Sequence[Arm], stored: str) -> Cell:
    """A cell that scores every window under every arm with weights in the format `stored`."""
    params = profile_params(run.profile) | {"sizes": sizes.record(), "arms": [arm.record() for arm in arms]}
    task = "artifact.measure.format_cells:scored"
    return Cell(claim, f"format-{stored}", task, params | {"stored": stored}, timeout_s=7200.0)


def scored(params: Row) -> Iterator[Row]:
    """Task: one row per window and arm, as `masked_cells.scored` yields them."""
    yield {"progress": 0.0, "doing": f"loading weights in {params['stored']}"}
    bench = opened(params, [])
    stored = getattr(torch, params["stored"])
    bench = replace(bench, weights=models.load(params["model"], params["device"], stored))
    yield from windows_scored(bench, [arm_of(record) for record in params["arms"]], KIND)
