"""Windows, prompts and methods that the claims about CateKV and SparK share, so that each prefill is made once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from artifact.engine.checkpoints import open_checkpoint
from artifact.kv.catekv import CateKV
from artifact.measure.quality import Protocol
from artifact.records import Cell, Run

Row = dict[str, Any]

# The embedded model's prompts are a hundredth of the paper's 128K. What is set aside as recent must cover the
# observation rows, or heads that look at their neighbours seem to attend to one set of tokens: 64 of each, as many rows
# as the paper's, and with 4 sinks and 60 critical ones an eighth of 1,024 tokens.
EMBEDDED_CATEKV = CateKV(rows=64, sinks=4, recent=64, critical=60)
ADAPTIVE_SHARE = 0.4  # r of the paper's main setting
EMBEDDED, EMBEDDED_QUICK = Protocol(1024, 128, 8), Protocol(1024, 64, 3)
PAPER, PAPER_QUICK = Protocol(32768, 256, 8), Protocol(8192, 64, 5)
PAPER_WINDOW = 65536  # tokens that a model must hold for the paper's prompts
# Methods that choose anew for every query are scored step by step, which takes a hundred times as long per token.
STEPWISE_WINDOWS, STEPWISE_TOKENS = 4, 16
NO_WEIGHTS = "synthetic weights have no quality; run it with --profile embedded"


def scale(run: Run) -> str:
    """The sizes that the model's own window holds: "paper", or "embedded" for a small model under that profile."""
    if run.profile.name != "paper":
        return "embedded"
    return "paper" if open_checkpoint(run.profile.model).shape.window >= PAPER_WINDOW else "embedded"


def protocol(run: Run) -> Protocol:
    """Windows of this run's size."""
    if scale(run) == "paper":
        return PAPER_QUICK if run.quick else PAPER
    return EMBEDDED_QUICK if run.quick else EMBEDDED


def catekv(run: Run) -> CateKV:
    """CateKV's parameters: the paper's, or those of a model with a hundredth of the context."""
    return CateKV() if scale(run) == "paper" else EMBEDDED_CATEKV


def common(run: Run) -> Row:
    """The part of a cell's parameters that comes from the profile."""
    profile = run.profile
    return {"model": profile.model, "text": profile.text, "device": profile.device, "dtype": profile.dtype}


def window_cell(run: Run, claim: str, arms: list[Row], stepwise: bool = False) -> Cell:
    """All windows under all arms in one process; `stepwise` takes the first few windows and tokens of them."""
    size, key = protocol(run), "windows"
    params = {**common(run), "context": size.context_tokens, "scored": size.scored_tokens, "windows": size.windows}
    if stepwise:
        key, params["first"] = "stepwise", [min(STEPWISE_WINDOWS, size.windows), STEPWISE_TOKENS]
    return Cell(claim, key, "artifact.measure.kv_cells:scored", params | {"arms": arms}, timeout_s=3600.0)


def answer_cell(run: Run, claim: str, key: str, arms: list[Row], needles: list[Row], tracking: list[Row]) -> Cell:
    """Prompts of one kind under all arms."""
    params = {**common(run), "arms": arms, "needles": needles, "tracking": tracking}
    return Cell(claim, key, "artifact.measure.kv_cells:answered", params, timeout_s=3600.0)


def head_cell(run: Run, claim: str) -> Cell:
    """The reference set of CateKV's static head types; the paper: 100 samples of 128K tokens."""
    samples, tokens = (2, 512) if run.quick else (4, 1024)
    if scale(run) == "paper":
        samples, tokens = (2, 8192) if run.quick else (4, 32768)
    params = {**common(run), "samples": samples, "tokens": tokens, "catekv": asdict(catekv(run))}
    return Cell(claim, "heads", "artifact.measure.kv_cells:identify", params, timeout_s=3600.0)
