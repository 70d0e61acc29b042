"""What measuring processes share: tokens, thresholds and one dense prefill, made once and kept on disk.

A prefill over the longest context serves every shorter one, because a causal cache's prefix is the prefix's cache. On
a GPU tokens and thresholds alone are kept: a prefill takes seconds there, and at 128K tokens its file has 17 GB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from artifact import text
from artifact.engine import models, prepared_files, prompts
from artifact.engine.cache import KVCache
from artifact.engine.models import Weights
from artifact.engine.prefill import Prefill, prefill
from artifact.projection import teal
from artifact.shapes import Shape

CALIBRATION_TOKENS = 2048
GRID_TOKENS = 256  # observation queries are kept at every multiple, so that any of these contexts can be selected from
ROWS = 16
SYNTHETIC_PREFILL_TOKENS = 512

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Prepared:
    """Everything a cell needs before it decodes.

    tokens (n,) evaluation ids; calibration of the projection thresholds; cache of the dense prefill of
    tokens[:prefilled]; queries[n] per layer (heads, ROWS, d) for every n on the grid; text: one line naming both
    texts and their hashes.
    """

    weights: Weights
    tokens: torch.Tensor
    calibration: teal.Calibration
    cache: KVCache
    queries: Mapping[int, list[torch.Tensor]]
    text: str
    synthetic: bool = False

    def scale(self) -> float:
        return float(self.weights.shape.head_dim**-0.5)


def grid(tokens: int) -> int:
    """Round a context to the nearest length whose observation queries are kept, at least one step."""
    return max(1, round(tokens / GRID_TOKENS)) * GRID_TOKENS


def prepare(
    model: str,
    text_file: str | None,
    tokens: int,
    context: int,
    progress: Progress | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    selected: Iterable[int] | None = None,
) -> Prepared:
    """Load the model and make or reuse tokens, calibration and prefill.

    tokens: evaluation tokens needed in all; context: length of the prefill, rounded up to the grid by the caller, at
    most `tokens`. selected: the contexts that a selection is made from, None for any; a GPU keeps the observation
    queries of no others, and a file on disk holds all. Raises UserError when the text is too short, overlaps its
    calibration text or the context exceeds the window.
    """
    say = progress or (lambda share, doing: None)
    say(0.0, "loading the model")
    weights = models.load(model, device, dtype)
    calibration_text, evaluation_text = text.load(text_file, "calibration"), text.load(text_file, "evaluation")
    folder = folder_of(weights, calibration_text, evaluation_text)
    ids = _tokens(folder, model, calibration_text, evaluation_text, tokens)
    calibration = calibrated(folder, weights, ids["calibration"], say)
    evaluation = ids["evaluation"].to(weights.device)
    lengths = list(range(GRID_TOKENS, context + 1, GRID_TOKENS))
    if weights.device.type == "cpu":
        cache, queries = _prefilled(folder, weights, evaluation[:context], lengths, say)
    else:
        wanted = lengths if selected is None else sorted({grid(n) for n in selected} & set(lengths))
        made = _prefill(weights, evaluation[:context], wanted, say)
        cache, queries = made.cache, made.queries
    label = f"evaluation: {evaluation_text.label}; calibration: {calibration_text.label}"
    return Prepared(weights, evaluation, calibration, cache, queries, label)


def prepare_synthetic(shape: Shape, device: str, dtype: torch.dtype, context: int, seed: int = 0) -> Prepared:
    """Make weights, cache and queries of exact shape on the device, for timing at dimensions whose weights cannot be
    had.

    Thresholds are calibrated on the synthetic model's own activations, so counted keep ratios are real. The cache
    repeats a short prefill: what a step reads depends on lengths alone. Quality means nothing here and is never
    measured on it.
    """
    weights = models.synthetic(shape, device, dtype, seed)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    tokens = torch.randint(shape.vocab, (context + 256,), generator=generator, device=device)
    base = tokens[:SYNTHETIC_PREFILL_TOKENS]
    # Attention over copies of a prefill equals attention over the prefill: activations, and with them keep ratios,
    # are then those of the calibration at every context. The first half of its rows attends to few entries and is
    # left out.
    calibration = teal.calibrate(weights, base, skip=SYNTHETIC_PREFILL_TOKENS // 2)
    cache = prefill(weights, base, capacity=max(context, SYNTHETIC_PREFILL_TOKENS)).cache
    for start in range(SYNTHETIC_PREFILL_TOKENS, context, SYNTHETIC_PREFILL_TOKENS):
        width = min(SYNTHETIC_PREFILL_TOKENS, context - start)
        cache.keys[:, :, start : start + width] = cache.keys[:, :, :width]
        cache.values[:, :, start : start + width] = cache.values[:, :, :width]
    cache.set_tokens(context)
    label = f"synthetic weights and cache, seed {seed}"
    return Prepared(weights, tokens, calibration, cache, RandomQueries(shape, device, seed), label, synthetic=True)


class RandomQueries(Mapping[int, list[torch.Tensor]]):
    """Observation queries of any length, drawn when asked for: at 128K a stored grid of them would take gigabytes."""

    def __init__(self, shape: Shape, device: str, seed: int) -> None:
        self._shape, self._device, self._seed = shape, device, seed

    def __getitem__(self, tokens: int) -> list[torch.Tensor]:
        generator = torch.Generator(device=self._device).manual_seed(self._seed + tokens)
        size = (self._shape.heads, min(ROWS, tokens), self._shape.head_dim)
        return [torch.randn(size, generator=generator, device=self._device) for _ in range(self._shape.layers)]

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


def folder_of(weights: Weights, calibration: text.Text, evaluation: text.Text) -> Path:
    """Return where the files of a model and its texts lie; numbers of another device or precision lie elsewhere."""
    place = f"{weights.device.type}/{weights.dtype}"
    return prepared_files.folder_of(weights.identity, place, calibration.sha256, evaluation.sha256)


def _tokens(
    folder: Path, model: str, calibration: text.Text, evaluation: text.Text, count: int
) -> dict[str, torch.Tensor]:
    file = folder / f"tokens-{count}.safetensors"
    found = prepared_files.read(file)
    if found is None:
        tokenizer = models.load_tokenizer(model)
        found = {
            "calibration": prompts.encode_at_least(tokenizer, calibration.text, CALIBRATION_TOKENS, calibration.name),
            "evaluation": prompts.encode_at_least(tokenizer, evaluation.text, count, evaluation.name),
        }
        teal.require_disjoint(found["calibration"], found["evaluation"])
        prepared_files.write(file, found)
    return found


def calibrated(folder: Path, weights: Weights, tokens: torch.Tensor, say: Progress) -> teal.Calibration:
    """Measure the quantiles on calibration tokens (n,), or take them from `folder`."""
    file = folder / f"calibration-{tokens.shape[0]}.safetensors"
    found = prepared_files.read(file)
    if found is None:
        say(0.05, f"calibrating thresholds on {tokens.shape[0]:,} tokens")
        found = {"quantiles": teal.calibrate(weights, tokens).quantiles}
        prepared_files.write(file, found)
    return teal.Calibration(found["quantiles"], teal.hash_tokens(tokens), tokens.shape[0])


def _prefill(weights: Weights, tokens: torch.Tensor, lengths: list[int], say: Progress) -> Prefill:
    doing = f"dense prefill of {tokens.shape[0]:,} tokens"
    return prefill(
        weights, tokens, query_lengths=lengths, rows=ROWS, progress=lambda share: say(0.1 + 0.8 * share, doing)
    )


def _prefilled(
    folder: Path, weights: Weights, tokens: torch.Tensor, lengths: list[int], say: Progress
) -> tuple[KVCache, dict[int, list[torch.Tensor]]]:
    count = int(tokens.shape[0])
    file = folder / f"prefill-{count}.safetensors"
    found = prepared_files.read(file)
    if found is None:
        filled = _prefill(weights, tokens, lengths, say)
        queries = {f"queries-{n}": torch.stack(per_layer) for n, per_layer in filled.queries.items()}
        prepared_files.write(file, {"keys": filled.cache.keys, "values": filled.cache.values, **queries})
        found = prepared_files.read(file) or {}
    cache = KVCache(
        found["keys"],
        found["values"],
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(found["keys"].shape[:2], dtype=torch.int32),
    )
    cache.set_tokens(count)
    return cache, {n: list(found[f"queries-{n}"]) for n in lengths}


def describe(prepared: Prepared) -> str:
    """Return the provenance of a prepared set as compact JSON, for records."""
    return json.dumps(
        {
            "model": prepared.weights.identity,
            "text": prepared.text,
            "calibration_tokens": prepared.calibration.tokens_hash,
            "evaluation_tokens": teal.hash_tokens(prepared.tokens),
        },
        sort_keys=True,
    )
