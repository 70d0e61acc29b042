"""What quality measurements share: a loaded model with its tokenizer, texts and calibrated thresholds, and dense
prefills that are made once per run and kept on disk.

Files lie beside those of `artifact.engine.prepare`: named by hashes, safe to delete, bounded in size together with
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from artifact import text
from artifact.engine import models, prepare, prepared_files, prompts
from artifact.engine.cache import KVCache
from artifact.engine.models import Weights
from artifact.engine.prefill import Prefill, prefill
from artifact.projection import teal
from artifact.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 64  # observation queries kept per prompt: as many as the paper's selection uses

Say = Callable[[float, str], None]


@dataclass(frozen=True)
class Workbench:
    """A model ready to be evaluated. calibration_tokens (n,) are what `calibration` was measured on."""

    weights: Weights
    tokenizer: PreTrainedTokenizerBase
    calibration: teal.Calibration
    calibration_tokens: torch.Tensor
    calibration_text: Text
    evaluation_text: Text
    folder: Path
    say: Say = field(default=lambda share, doing: None, compare=False)

    @property
    def text_label(self) -> str:
        """One line naming both texts and their hashes."""
        return f"evaluation: {self.evaluation_text.label}; calibration: {self.calibration_text.label}"


def open_workbench(
    model: str, text_file: str | None, device: str = "cpu", dtype: str = "float32", say: Say | None = None
) -> Workbench:
    """Load a model and calibrate its thresholds (or reuse them). Raises UserError for a bad model or text."""
    weights = models.load(model, device, getattr(torch, dtype))
    tokenizer = models.load_tokenizer(model)
    calibration_text, evaluation_text = text.load(text_file, "calibration"), text.load(text_file, "evaluation")
    folder = prepare.folder_of(weights, calibration_text, evaluation_text)
    say = say or (lambda share, doing: None)
    ids = prompts.encode_at_least(tokenizer, calibration_text.text, prepare.CALIBRATION_TOKENS, calibration_text.name)
    calibration = prepare.calibrated(folder, weights, ids, say)
    return Workbench(weights, tokenizer, calibration, ids, calibration_text, evaluation_text, folder, say)


@dataclass(frozen=True)
class Prefilled:
    """A dense prefill of `tokens`: its cache and, per layer, the queries (heads, ROWS, d) of its last tokens."""

    tokens: torch.Tensor
    cache: KVCache
    queries: list[torch.Tensor]


def prefilled(bench: Workbench, tokens: torch.Tensor, doing: str) -> Prefilled:
    """Make the dense prefill of tokens (n,), or map it from disk when an earlier cell made it; a GPU makes it anew."""
    count = int(tokens.shape[0])
    if bench.weights.device.type != "cpu":
        filled = _prefill(bench, tokens, doing)
        return Prefilled(tokens, filled.cache, filled.queries[count])
    digest = hashlib.sha256(f"{teal.hash_tokens(tokens)}|{bench.weights.dtype}|{ROWS}".encode()).hexdigest()[:16]
    file = bench.folder / f"prompt-{digest}.safetensors"
    found = prepared_files.read(file)
    if found is None:
        filled = _prefill(bench, tokens, doing)
        queries = torch.stack(filled.queries[count])
        prepared_files.write(file, {"keys": filled.cache.keys, "values": filled.cache.values, "queries": queries})
        return Prefilled(tokens, filled.cache, filled.queries[count])
    counters = torch.zeros(found["keys"].shape[:2], dtype=torch.int32)
    cache = KVCache(found["keys"], found["values"], torch.zeros(1, dtype=torch.int32), counters)
    cache.set_tokens(count)
    return Prefilled(tokens, cache, list(found["queries"]))


def _prefill(bench: Workbench, tokens: torch.Tensor, doing: str) -> Prefill:
    count = int(tokens.shape[0])
    return prefill(bench.weights, tokens, None, (count,), ROWS, progress=lambda share: bench.say(share, doing))
