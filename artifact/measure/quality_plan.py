"""The windows and settings that quality claims share, so that each dense prefill is made once per run."""

from __future__ import annotations

from dataclasses import replace

from artifact.engine.checkpoints import open_checkpoint
from artifact.errors import UserError
from artifact.measure.configuration import Configuration
from artifact.measure.quality import Protocol
from artifact.records import Run

# The paper: eight windows of 32K and 512 scored tokens. A prompt of 4K is half of the embedded model's window, and
# eight of them are what its default text holds.
EMBEDDED = Protocol(context_tokens=4096, scored_tokens=128, windows=8)
EMBEDDED_QUICK = Protocol(context_tokens=2048, scored_tokens=64, windows=3)
PAPER = Protocol(context_tokens=32768, scored_tokens=512, windows=8)
PAPER_QUICK = Protocol(context_tokens=8192, scored_tokens=128, windows=3)

PROJECTION_KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5)
KV_KEEPS = (0.7, 0.5, 0.3, 0.2, 0.1)
# The paper's grid of Table 4 ends at 20% KV keep; its sweep of Figure 6 goes down to 10%.
GRID_KV_KEEPS = (0.5, 0.3, 0.2)
# (r_p, r_kv) of the compositions: each projection keep with the KV keep ratios that pair with its cost.
COMPOSED = ((0.9, 0.5), (0.9, 0.3), (0.8, 0.5), (0.8, 0.3), (0.8, 0.2), (0.7, 0.3), (0.7, 0.2), (0.6, 0.2), (0.5, 0.2))
WINDOW_KEEP = 0.3  # of the window that perplexity cannot tell from the selection
PAPERS_COMPOSITION = (0.5, 0.3)


def protocol(run: Run) -> Protocol:
    """Windows of this run's size: the paper's on the paper's models, smaller ones on the embedded model; contexts are
    halved until the model's own window holds them.
    """
    if run.profile.name == "paper":
        wanted = PAPER_QUICK if run.quick else PAPER
        return fitted(wanted, open_checkpoint(run.profile.model).shape.window)
    return EMBEDDED_QUICK if run.quick else EMBEDDED


def fitted(wanted: Protocol, window: int) -> Protocol:
    """Halve the context until a whole window fits the model's. UserError when nothing is left."""
    while wanted.window_tokens > window:
        if wanted.context_tokens < 2:
            raise UserError(
                f"a model with a window of {window} tokens cannot score {wanted.scored_tokens}; take another"
            )
        wanted = replace(wanted, context_tokens=wanted.context_tokens // 2)
    return wanted


def singles() -> list[Configuration]:
    """Dense and every single branch of the sweep."""
    projection = [Configuration(r_p=keep) for keep in PROJECTION_KEEPS]
    selection = [Configuration(r_kv=keep, method="snapkv") for keep in KV_KEEPS]
    return [Configuration(), *projection, *selection]


def families() -> dict[str, list[Configuration]]:
    """Configurations that are scored together, in one process per few windows.

    Claims that ask for any of a family ask for the same cells, which a run measures once.
    """
    compositions = [Configuration(r_p, r_kv, "snapkv") for r_p, r_kv in (*COMPOSED, PAPERS_COMPOSITION)]
    return {
        "projection": [arm for arm in singles() if arm.method == "full"],
        "selection": [arm for arm in singles() if arm.method != "full"],
        "composed": compositions,
        "window": [Configuration(r_kv=WINDOW_KEEP, method="window")],
    }


def grid() -> list[Configuration]:
    """All settings of the composition table: dense, single and composed (the paper has 16)."""
    found = [arm for arm in singles() if arm.method == "full" or arm.r_kv in GRID_KV_KEEPS]
    return [*found, *(Configuration(r_p, r_kv, "snapkv") for r_p, r_kv in COMPOSED)]
