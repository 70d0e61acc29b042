"""Block-wise greedy thresholds (TEAL, Algorithm 1): every layer reaches the same effective sparsity, but spreads it
over its seven projections where its output suffers least.

Effective sparsity weighs each projection by its real number of weights: half of k is few bytes, half of down is many.
Projections that share an input (q, k, v; gate, up) may get different thresholds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch

from artifact.engine import teacher
from artifact.engine.models import Weights
from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.projection.teal import Calibration
from artifact.projection.thresholds import PROJECTIONS, Thresholds
from artifact.shapes import Shape

STEP = 0.1  # sparsity added to one projection at a time
ROWS = 48  # calibration tokens whose block outputs are compared
MOST = 0.95  # no projection is emptied

Error = Callable[[int, torch.Tensor], float]


@dataclass(frozen=True)
class Greedy:
    """A calibration whose keep ratio is met by every layer as a whole: keeps (L, 7) are the shares that it chose.

    Valid for one keep ratio alone: the allocation differs from ratio to ratio.
    """

    calibration: Calibration
    keep: float
    keeps: torch.Tensor

    def thresholds(self, keep: float) -> Thresholds:
        """Return the thresholds of the ratio that was allocated. Raises UserError for any other ratio."""
        if keep != self.keep:
            raise UserError(
                f"thresholds were allocated greedily for keep ratio {self.keep}, not {keep}; allocate again"
            )
        return thresholds_of(self.calibration, self.keeps)


def shares(shape: Shape) -> torch.Tensor:
    """Return (7,) float64: each projection's share of a layer's projection weights, from its real shape."""
    counts = torch.tensor([float(p.inputs * p.outputs) for p in shape.projections], dtype=torch.float64)
    return counts / counts.sum()


def effective_keep(shape: Shape, keeps: torch.Tensor) -> torch.Tensor:
    """Return the share of weights read per layer (L,) of keeps (L, 7)."""
    return keeps.double() @ shares(shape)


def thresholds_of(calibration: Calibration, keeps: torch.Tensor) -> Thresholds:
    """Thresholds for one keep ratio per layer and projection, keeps (L, 7)."""
    values = torch.empty(keeps.shape, dtype=torch.float32)
    tables = {keep: calibration.thresholds(keep).values for keep in {round(float(k), 6) for k in keeps.flatten()}}
    for layer in range(keeps.shape[0]):
        for column in range(keeps.shape[1]):
            values[layer, column] = tables[round(float(keeps[layer, column]), 6)][layer, column]
    return Thresholds(values, float(keeps.mean()), calibration.tokens_hash)


def allocate(weights: Weights, calibration: Calibration, tokens: torch.Tensor, keep: float) -> Greedy:
    """Allocate thresholds for one keep ratio on calibration tokens (n,), layer by layer."""
    if not 0.0 < keep < 1.0:
        raise UserError(f"greedy keep ratio {keep} is not in (0, 1); give the share of weights to read, such as 0.5")
    error = block_errors(weights, calibration, tokens)
    share = shares(weights.shape)
    layers = [allocate_layer(lambda keeps, i=i: error(i, keeps), share, keep) for i in range(weights.shape.layers)]  # type: ignore[misc]
    return Greedy(calibration, keep, torch.stack(layers))


def allocate_layer(error: Callable[[torch.Tensor], float], share: torch.Tensor, keep: float) -> torch.Tensor:
    """Return (7,) keep ratios of one layer: repeatedly sparsify the projection with the least error per weight saved.

    error(keeps) is the layer's output error. Candidates are kept in a heap with the error that they had when last
    tried and are tried again only when they come first, since errors mostly grow as the layer gets sparser.
    """
    error = _remembered(error)  # a step that is taken was tried just before
    keeps = torch.ones(len(share), dtype=torch.float64)
    heap = [(_price(error, keeps, share, i, 0.0), i) for i in range(len(share))]
    heapq.heapify(heap)
    current = 0.0
    while (excess := float(keeps @ share) - keep) > 1e-9:
        _, index = heapq.heappop(heap)
        price = _price(error, keeps, share, index, current)
        if heap and price > heap[0][0]:
            heapq.heappush(heap, (price, index))
            continue
        # The last step is cut so that the layer meets its ratio exactly.
        keeps[index] -= min(STEP, float(excess / share[index]), float(keeps[index]) - (1 - MOST))
        current = error(keeps)
        if keeps[index] > 1 - MOST + 1e-9:
            heapq.heappush(heap, (_price(error, keeps, share, index, current), index))
    return keeps


def _remembered(error: Callable[[torch.Tensor], float]) -> Callable[[torch.Tensor], float]:
    known: dict[tuple[float, ...], float] = {}

    def found(keeps: torch.Tensor) -> float:
        key = tuple(keeps.tolist())
        if key not in known:
            known[key] = error(keeps)
        return known[key]

    return found


def _price(
    error: Callable[[torch.Tensor], float], keeps: torch.Tensor, share: torch.Tensor, index: int, current: float
) -> float:
    tried = keeps.clone()
    step = min(STEP, float(keeps[index]) - (1 - MOST))
    tried[index] -= step
    return (error(tried) - current) / (step * float(share[index]))


def block_errors(weights: Weights, calibration: Calibration, tokens: torch.Tensor) -> Error:
    """Return error(layer, keeps): relative error of that layer's output on the last ROWS tokens, its input dense."""
    count = int(tokens.shape[0])
    if count <= 2 * ROWS:
        raise UserError(f"{count} calibration tokens are too few for greedy thresholds; give more than {2 * ROWS}")
    tokens = tokens.to(weights.device)
    filled = prefill(weights, tokens[: count - ROWS])
    run = teacher.Layerwise(weights, filled.cache, tokens[count - ROWS :])
    outputs: dict[int, torch.Tensor] = {}
    tables: dict[float, torch.Tensor] = {}  # thresholds (L, 7) of a keep ratio

    def limit(layer: int, column: int, keep: float) -> torch.Tensor:
        if keep not in tables:
            tables[keep] = calibration.thresholds(keep).values
        return tables[keep][layer, column]

    def error(layer: int, keeps: torch.Tensor) -> float:
        if layer not in outputs:
            outputs[layer] = run.output(layer, None)
        limits = torch.stack([limit(layer, i, float(keep)) for i, keep in enumerate(keeps)])
        dense = outputs[layer]
        return float((run.output(layer, limits) - dense).norm() / (dense - run.inputs[layer]).norm())

    return error


def describe(greedy: Greedy) -> dict[str, float]:
    """Mean keep ratio of every projection over layers, for records."""
    return {name: round(float(greedy.keeps[:, i].mean()), 4) for i, name in enumerate(PROJECTIONS)}
