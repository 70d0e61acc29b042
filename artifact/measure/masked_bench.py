"""A model with its gate calibration and routing scores, made once and kept on disk beside other prepared files.

The calibration text is cut in order: calibration tokens, routing corpus, and what is left to choose routing thresholds
on. None of it is evaluated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from artifact import text
from artifact.embedded import data_folder
from artifact.engine import models, prepare, prepared_files, prompts, teacher
from artifact.engine.models import Weights
from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.measure.masked_plan import RANDOM, RANK, TARGETS, Arm, Sizes
from artifact.projection import gate_calibration, routing
from artifact.projection.branch import Projection
from artifact.projection.gate_calibration import GateCalibration
from artifact.projection.lora import AdaptedMask, load_adapter, random_adapter
from artifact.projection.masked import GateMask
from artifact.projection.teal import require_disjoint
from artifact.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Say = Callable[[float, str], None]
ROUTED_SPARSITY = 0.5  # the paper's operating point of routing
LEAST_HELD_OUT = 1024


@dataclass(frozen=True)
class MaskedBench:
    """calibration_tokens, corpus and held_out (n,) are consecutive pieces of the calibration text."""

    weights: Weights
    tokenizer: PreTrainedTokenizerBase
    sizes: Sizes
    calibration: GateCalibration
    calibration_tokens: torch.Tensor
    corpus: torch.Tensor
    held_out: torch.Tensor
    calibration_text: Text
    evaluation_text: Text
    folder: Path
    say: Say

    @property
    def text_label(self) -> str:
        return f"evaluation: {self.evaluation_text.label}; calibration: {self.calibration_text.label}"

    def sequences(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Cut tokens (n,) into the sequences that the model reads, each with the beginning that its tokenizer wants."""
        return cut(self.tokenizer, tokens, self.sizes.sequence)

    @cached_property
    def scores(self) -> routing.Scores:
        """Routing scores of SATS at its operating point, from the corpus."""
        branch = self.calibration.mask("sats", ROUTED_SPARSITY)
        base, sparse = (self._losses(name, one) for name, one in (("base", None), ("sparse", branch)))
        ids = torch.cat([piece[1:-1] for piece in self.sequences(self.corpus)])
        return routing.scores(self.weights.shape.vocab, ids, base, sparse)

    def _losses(self, name: str, branch: GateMask | None) -> torch.Tensor:
        """Return the loss after every token of the corpus but the first of a sequence, kept on disk."""
        limits = "" if branch is None else str(branch.limits.tolist())
        key = hashlib.sha256(f"{limits}|{self.corpus.tolist()}|{self.sizes.sequence}".encode()).hexdigest()[:16]
        file = self.folder / f"losses-{name}-{key}.safetensors"
        found = prepared_files.read(file)
        if found is None:
            pieces = self.sequences(self.corpus)
            parts = []
            for number, piece in enumerate(pieces):
                self.say(number / len(pieces), f"routing corpus, {name} path, {number + 1} of {len(pieces)}")
                parts.append(losses(self.weights, piece, 1, branch).cpu())
            found = {"losses": torch.cat(parts)}
            prepared_files.write(file, found)
        return found["losses"]

    def branch(self, arm: Arm, evaluated: torch.Tensor) -> Projection | None:
        """What an arm runs; None for dense. evaluated (n,): token ids that will be read.

        The threshold of the scored table knows the held-out split alone. A random table is a control: it routes the
        share of `evaluated` that the scored one routes, so that both differ by what they know and nothing else.
        """
        if arm.method == "dense":
            return None
        mask = self.calibration.mask(arm.method, arm.sparsity)
        if arm.share < 1:
            table = self.scores.table(self.scores.threshold(self.held_out, arm.share))
            if arm.table == "random":
                control = routing.random_scores(self.weights.shape.vocab, arm.seed)
                share = float(table[evaluated].double().mean())
                table = control.table(control.threshold(evaluated, share)) if share > 0 else table
            mask = GateMask(mask.limits, table)
        return adapted(mask, arm, self.weights)

    def held_out_share(self, arm: Arm) -> float:
        """The share of the held-out split that an arm's scored table routes (sats, R of equation 14)."""
        return float(self.scores.table(self.scores.threshold(self.held_out, arm.share))[self.held_out].double().mean())

    def require_apart(self, windows: torch.Tensor) -> None:
        """Raise UserError when a window (windows, n) holds text that anything here was calibrated on."""
        used = torch.cat((self.calibration_tokens, self.corpus, self.held_out))
        for window in windows:
            require_disjoint(used, window)


def cut(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor, sequence: int) -> list[torch.Tensor]:
    """Return sequences of at most `sequence` tokens, a beginning-of-sequence token ahead where one is wanted."""
    start = torch.tensor(prompts.beginning(tokenizer), dtype=tokens.dtype)
    return [torch.cat((start, piece)) for piece in tokens.split(sequence - len(start))]


def adapter_place(name: str) -> Path:
    """Where `artifact finetune` leaves adapters, by name: records never hold a path of this machine."""
    return data_folder() / "adapters" / name


def adapted(mask: GateMask, arm: Arm, weights: Weights) -> GateMask | AdaptedMask:
    """The mask with the adapter that an arm names, if it names one."""
    if not arm.adapter:
        return mask
    adapter = random_adapter(weights.shape, RANK) if arm.adapter == RANDOM else load_adapter(adapter_place(arm.adapter))
    return AdaptedMask(mask, adapter, arm.fused)


def losses(weights: Weights, tokens: torch.Tensor, context: int, branch: Projection | None) -> torch.Tensor:
    """Return (n - context - 1,) float64 nats: the loss after each token from `context` on, the tokens before dense."""
    cache = prefill(weights, tokens[:context]).cache
    block = teacher.forward(weights, cache, tokens[context:-1], branch)
    return teacher.token_nll(weights, block.hidden, tokens[context + 1 :].to(weights.device))


def open_bench(
    model: str, text_file: str | None, device: str, dtype: str, sizes: Sizes, say: Say | None = None
) -> MaskedBench:
    """Load a model, calibrate its gate or read the calibration. UserError for a bad model or a text too short."""
    say = say or (lambda share, doing: None)
    weights = models.load(model, device, getattr(torch, dtype))
    tokenizer = models.load_tokenizer(model)
    calibration_text, evaluation_text = text.load(text_file, "calibration"), text.load(text_file, "evaluation")
    ids = torch.tensor(tokenizer(calibration_text.text, add_special_tokens=False).input_ids)
    needed = sizes.calibration + sizes.corpus + LEAST_HELD_OUT
    if ids.shape[0] < needed:
        raise UserError(
            f"{calibration_text.name} has {ids.shape[0]:,} tokens, {needed:,} are needed; give a longer text"
        )
    folder = prepare.folder_of(weights, calibration_text, evaluation_text)
    first, corpus, held_out = ids.tensor_split((sizes.calibration, sizes.calibration + sizes.corpus))
    pieces = cut(tokenizer, first, sizes.sequence)
    calibration = _calibration(folder, weights, pieces, calibration_text, sizes, say)
    return MaskedBench(
        weights=weights,
        tokenizer=tokenizer,
        sizes=sizes,
        calibration=calibration,
        calibration_tokens=first,
        corpus=corpus,
        held_out=held_out,
        calibration_text=calibration_text,
        evaluation_text=evaluation_text,
        folder=folder,
        say=say,
    )


def _calibration(
    folder: Path, weights: Weights, pieces: list[torch.Tensor], source: Text, sizes: Sizes, say: Say
) -> GateCalibration:
    """The calibration of these sizes: read where an earlier process left it, made and left where not."""
    here = Path(gate_calibration.__file__).resolve().parent
    digest = hashlib.sha256(f"{sizes.record()}|{TARGETS}|{weights.dtype}".encode())
    for name in ("gate_calibration.py", "gate_stats.py", "sats.py", "cats.py"):
        digest.update((here / name).read_bytes())
    file = folder / f"gate-{digest.hexdigest()[:16]}.safetensors"
    if file.exists():
        return gate_calibration.load(file, weights)
    say(0.0, f"calibrating the gate on {sizes.calibration:,} tokens")
    made = gate_calibration.calibrate(weights, pieces, source.sha256, TARGETS, sizes.rows)
    made.save(file)
    return made
