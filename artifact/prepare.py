"""What measuring processes share: tokens, thresholds and one dense prefill, made once and kept on disk.

A prefill over the longest context serves every shorter one, because a causal cache's prefix is the prefix's cache.
Files lie under `prepared/` of the data folder, named by a hash of the model, the text and the sources that made them;
they are safe to delete and pruned to MAX_BYTES, oldest first.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from artifact import models, prompts, text
from artifact.cache import KVCache
from artifact.embedded import data_folder
from artifact.errors import UserError
from artifact.models import Weights
from artifact.prefill import prefill
from artifact.projection import teal
from artifact.shapes import Shape

MAX_BYTES = 4_000_000_000
CALIBRATION_TOKENS = 2048
GRID_TOKENS = 256  # observation queries are kept at every multiple, so that any of these contexts can be selected from
ROWS = 16
SYNTHETIC_PREFILL_TOKENS = 512

Progress = Callable[[float, str], None]
_SOURCES = ("prefill.py", "models.py", "checkpoints.py", "rope.py", "prompts.py", "prepare.py", "projection/teal.py")


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


def prepare(model: str, text_file: str | None, tokens: int, context: int, progress: Progress | None = None) -> Prepared:
    """Load the model and make or reuse tokens, calibration and prefill.

    tokens: evaluation tokens needed in all; context: length of the prefill, rounded up to the grid by the caller, at
    most `tokens`. Raises UserError when the text is too short, overlaps its calibration text or the context exceeds
    the window.
    """
    say = progress or (lambda share, doing: None)
    say(0.0, "loading the model")
    weights = models.load(model)
    calibration_text, evaluation_text = text.load(text_file, "calibration"), text.load(text_file, "evaluation")
    folder = _folder(weights.identity, calibration_text.sha256, evaluation_text.sha256)
    ids = _tokens(folder, model, calibration_text, evaluation_text, tokens)
    calibration = _calibration(folder, weights, ids["calibration"], say)
    cache, queries = _prefilled(folder, weights, ids["evaluation"][:context], say)
    label = f"evaluation: {evaluation_text.label}; calibration: {calibration_text.label}"
    return Prepared(weights, ids["evaluation"], calibration, cache, queries, label)


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
    return Prepared(weights, tokens, calibration, cache, _RandomQueries(shape, device, seed), label, synthetic=True)


class _RandomQueries(Mapping[int, list[torch.Tensor]]):
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


def _folder(*parts: str) -> Path:
    digest = hashlib.sha256("|".join(parts).encode())
    here = Path(__file__).resolve().parent
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    folder = data_folder() / "prepared" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); set ARTIFACT_DATA to a writable folder"
        ) from error
    return folder


def _tokens(
    folder: Path, model: str, calibration: text.Text, evaluation: text.Text, count: int
) -> dict[str, torch.Tensor]:
    file = folder / f"tokens-{count}.safetensors"
    found = _read(file)
    if found is None:
        tokenizer = models.load_tokenizer(model)
        found = {
            "calibration": prompts.encode_at_least(tokenizer, calibration.text, CALIBRATION_TOKENS, calibration.name),
            "evaluation": prompts.encode_at_least(tokenizer, evaluation.text, count, evaluation.name),
        }
        teal.require_disjoint(found["calibration"], found["evaluation"])
        _write(file, found)
    return found


def _calibration(folder: Path, weights: Weights, tokens: torch.Tensor, say: Progress) -> teal.Calibration:
    file = folder / f"calibration-{tokens.shape[0]}.safetensors"
    found = _read(file)
    if found is None:
        say(0.05, f"calibrating thresholds on {tokens.shape[0]:,} tokens")
        found = {"quantiles": teal.calibrate(weights, tokens).quantiles}
        _write(file, found)
    return teal.Calibration(found["quantiles"], teal.hash_tokens(tokens), tokens.shape[0])


def _prefilled(
    folder: Path, weights: Weights, tokens: torch.Tensor, say: Progress
) -> tuple[KVCache, dict[int, list[torch.Tensor]]]:
    count = int(tokens.shape[0])
    file = folder / f"prefill-{count}.safetensors"
    lengths = list(range(GRID_TOKENS, count + 1, GRID_TOKENS))
    found = _read(file)
    if found is None:
        doing = f"dense prefill of {count:,} tokens"
        filled = prefill(
            weights, tokens, query_lengths=lengths, rows=ROWS, progress=lambda share: say(0.1 + 0.8 * share, doing)
        )
        queries = {f"queries-{n}": torch.stack(per_layer) for n, per_layer in filled.queries.items()}
        _write(file, {"keys": filled.cache.keys, "values": filled.cache.values, **queries})
        found = _read(file) or {}
    cache = KVCache(
        found["keys"],
        found["values"],
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(found["keys"].shape[:2], dtype=torch.int32),
    )
    cache.set_tokens(count)
    return cache, {n: list(found[f"queries-{n}"]) for n in lengths}


def _read(file: Path) -> dict[str, torch.Tensor] | None:
    """Memory-map a file of tensors; None when it is absent or was cut short (it is then made again)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(file))
        os.utime(file)
    except (SafetensorError, OSError):
        return None
    return tensors


def _write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write under another name and rename, so that a killed process leaves no half file under the real one."""
    from safetensors.torch import save_file

    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    os.close(handle)
    try:
        save_file({key: value.contiguous() for key, value in tensors.items()}, name)
        os.replace(name, file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); free some disk or set ARTIFACT_DATA") from error
    finally:
        Path(name).unlink(missing_ok=True)
    prune(file.parent.parent, keep=file)


def prune(root: Path, keep: Path, limit: int = MAX_BYTES) -> None:
    """Delete the least recently used prepared files until at most `limit` bytes remain; `keep` is never deleted."""
    files = sorted((p for p in root.glob("*/*.safetensors")), key=lambda p: p.stat().st_mtime)
    total = sum(p.stat().st_size for p in files)
    for file in files:
        if total <= limit:
            return
        if file != keep:
            total -= file.stat().st_size
            file.unlink(missing_ok=True)


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
