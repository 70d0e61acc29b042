"""The result of gate-mask calibration as one small file: CATS percentiles and SATS error curves of a model.

The file names what it came from: the model, the text and the tokens, and every number that decided it. It is refused
for another model, and its tokens are held apart from those that are evaluated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from artifact.engine.models import Weights
from artifact.engine.prepared_files import save
from artifact.errors import UserError, one_line
from artifact.projection import cats, gate_stats, sats
from artifact.projection.masked import GateMask
from artifact.projection.sats import Curves

SCHEMA = 1
METHODS = ("cats", "sats", "sats-inner")


@dataclass(frozen=True)
class Origin:
    """What a calibration came from: identity of the model, hash of its text, hash and number of tokens; positions whose
    errors were averaged, longest sequence, epsilon of equation 6, target sparsities around which candidates are dense.
    """

    model: str
    text_sha256: str
    tokens_hash: str
    tokens: int
    rows: int
    sequence: int
    epsilon: float
    targets: tuple[float, ...]


@dataclass(frozen=True)
class GateCalibration:
    """quantiles (L, LEVELS + 1) of |SiLU(gate)|; curves of the local error."""

    quantiles: torch.Tensor
    curves: Curves
    origin: Origin

    def mask(self, method: str, sparsity: float) -> GateMask:
        """Thresholds of a method at a target sparsity. Raises UserError for a method that is none.

        sats-inner, ours: SATS for all layers but the first and the last, which keep the percentile. Their outputs are
        easily kept to a relative error, at sparsities that the model does not bear.
        """
        if method not in METHODS:
            raise UserError(f"no gate-mask method is called {method!r}; choose one of {', '.join(METHODS)}")
        percentile = cats.thresholds(self.quantiles, sparsity)
        if method == "cats":
            return percentile
        if method == "sats-inner":
            inner = self.curves.layers(1, -1)
            limits = inner.mask(inner.budget(sparsity)).limits
            return GateMask(torch.cat((percentile.limits[:1], limits, percentile.limits[-1:])))
        return self.curves.mask(self.curves.budget(sparsity))

    def save(self, file: Path) -> None:
        """Write tensors and origin; under another name first, so that no half file is left."""
        tensors = {"quantiles": self.quantiles, "candidates": self.curves.candidates}
        tensors |= {"errors": self.curves.errors, "shares": self.curves.shares}
        scratch = file.with_name(f"{file.name}.{os.getpid()}.part")
        try:
            save(scratch, tensors, {"schema": str(SCHEMA), "origin": json.dumps(asdict(self.origin))})
            os.replace(scratch, file)
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}); choose a writable folder") from error
        finally:
            scratch.unlink(missing_ok=True)


def load(file: Path, weights: Weights) -> GateCalibration:
    """Read a calibration of this model. Raises UserError when it is unreadable, newer, or another model's."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in ("quantiles", "candidates", "errors", "shares")}
        schema, record = int(metadata["schema"]), json.loads(metadata["origin"])
        origin = Origin(**(record | {"targets": tuple(record["targets"])}))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{file.name} is no gate calibration ({one_line(error)}); calibrate again") from error
    if schema > SCHEMA:
        raise UserError(f"{file.name} has schema {schema}, this version reads up to {SCHEMA}; update the artifact")
    if origin.model != weights.identity:
        raise UserError(
            f"{file.name} was calibrated on the model {origin.model}, not {weights.identity}; calibrate again"
        )
    curves = Curves(tensors["candidates"], tensors["errors"], tensors["shares"])
    return GateCalibration(tensors["quantiles"], curves, origin)


def calibrate(
    weights: Weights,
    sequences: Sequence[torch.Tensor],
    text_sha256: str,
    targets: tuple[float, ...],
    rows: int = gate_stats.SAMPLE_ROWS,
    epsilon: float = sats.EPSILON,
) -> GateCalibration:
    """Calibrate on token sequences (n,), prefilled one by one."""
    statistics = gate_stats.collect(weights, sequences, rows)
    curves = sats.curves(weights, statistics, targets, epsilon)
    quantiles = torch.stack([gate_stats.quantile_table(gate) for gate in statistics.gates])
    origin = Origin(
        model=weights.identity,
        text_sha256=text_sha256,
        tokens_hash=statistics.tokens_hash,
        tokens=statistics.tokens,
        rows=int(statistics.inputs.shape[1]),
        sequence=max(int(tokens.shape[0]) for tokens in sequences),
        epsilon=epsilon,
        targets=targets,
    )
    return GateCalibration(quantiles, curves, origin)
