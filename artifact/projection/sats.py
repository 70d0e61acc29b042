"""SATS: per layer the largest threshold whose local error stays within one budget (sats, equations 6 to 10).

Candidate thresholds are quantiles of |SiLU(gate)|. Err_l(t) is estimated for each; t_l(b) is the largest candidate with
Err_l(t) <= b; S(b) is the mean share dropped. S changes only where b passes an error value, so the budget whose
realised sparsity is closest to the target is found exactly among those. The search is coarse to fine: a coarse set of
candidates places the budget, then every layer gets denser candidates around its own threshold, as the paper has it.

Defined where the paper is silent: the candidate that drops nothing (limit -1, error 0) belongs to every layer, so some
threshold is always admissible; where the error is not monotone the largest admissible threshold counts, whatever lies
below it; equal thresholds are one candidate, with the share that it really drops; of budgets equally close to the
target the smallest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from artifact.checks import in_range, positive
from artifact.engine.models import Weights
from artifact.errors import UserError
from artifact.projection.gate_stats import GateStatistics, errors, shares_dropped
from artifact.projection.masked import GateMask

EPSILON = 1e-6  # the outputs' norms are near 1 and above; only an output of zero would feel it
COARSE = 20  # candidates per layer at first: every 5% of sparsity
FINE = 6  # per layer, round and target, between two neighbouring candidates
ROUNDS = 2


@dataclass(frozen=True)
class Curves:
    """Per layer, in ascending order of threshold: candidates, errors and shares dropped, all (L, C) float64.

    The first candidate drops nothing. Layers with fewer candidates than others repeat their last one.
    """

    candidates: torch.Tensor
    errors: torch.Tensor
    shares: torch.Tensor

    def layers(self, first: int, last: int) -> Curves:
        """The curves of layers first to last, as a slice has them."""
        return Curves(self.candidates[first:last], self.errors[first:last], self.shares[first:last])

    def admissible(self, budget: float) -> torch.Tensor:
        """Return (L,) int64: the index of the largest candidate whose error is within the budget (equation 7)."""
        places = torch.arange(self.errors.shape[1]).expand_as(self.errors)
        return torch.where(self.errors <= budget, places, 0).amax(1)

    def sparsity(self, budget: float) -> float:
        """S(b): the mean over layers of the share dropped (equation 9)."""
        return float(self.shares.gather(1, self.admissible(budget)[:, None]).mean())

    def mask(self, budget: float) -> GateMask:
        """The limits of every layer at one budget (equation 8)."""
        if not budget >= 0:
            raise UserError(f"budget {budget} is negative; errors are shares of the output, from 0 up")
        return GateMask(self.candidates.gather(1, self.admissible(budget)[:, None])[:, 0].float())

    def budget(self, target: float) -> float:
        """The budget whose realised sparsity is closest to the target (equation 10), the smallest among equals.

        One pass over the errors in ascending order: each only ever moves its own layer's threshold up.
        """
        in_range("target sparsity", target, 0, 1)
        layers, count = self.errors.shape
        order = self.errors.flatten().argsort(stable=True).tolist()
        values, shares = self.errors.flatten().tolist(), self.shares.flatten().tolist()
        best = [0] * layers
        total, closest, found = sum(self.shares[:, 0].tolist()), float("inf"), 0.0
        for number, place in enumerate(order):
            layer, index = divmod(place, count)
            if index > best[layer]:
                total += shares[place] - shares[layer * count + best[layer]]
                best[layer] = index
            if number + 1 < len(order) and values[order[number + 1]] == values[place]:
                continue  # a budget admits all errors equal to it
            distance = abs(total / layers - target)
            if distance < closest - 1e-12:
                closest, found = distance, values[place]
        return found


def curves(
    weights: Weights,
    statistics: GateStatistics,
    targets: tuple[float, ...],
    epsilon: float = EPSILON,
    coarse: int = COARSE,
    fine: int = FINE,
) -> Curves:
    """Estimate error curves, densest around the thresholds that the target sparsities come to."""
    positive("epsilon", epsilon)
    levels = [torch.arange(1, coarse, dtype=torch.float64) / coarse for _ in statistics.gates]
    found = _curves(weights, statistics, levels, epsilon)
    for _ in range(ROUNDS):
        extra = [_denser(found, target, fine) for target in targets]
        levels = [torch.cat([each[layer] for each in extra]) for layer in range(len(levels))]
        found = _merge(found, _curves(weights, statistics, levels, epsilon))
    return found


def _curves(weights: Weights, statistics: GateStatistics, levels: list[torch.Tensor], epsilon: float) -> Curves:
    """Curves at given shares per layer, with the candidate that drops nothing."""
    rows = []
    for index, (gate, level) in enumerate(zip(statistics.gates, levels, strict=True)):
        limits = gate.quantile(level)
        measured = errors(weights.layers[index], statistics.inputs[index], limits, epsilon)
        rows.append((limits.double(), measured, shares_dropped(gate, limits, level)))
    start = torch.tensor([[-1.0], [0.0], [0.0]], dtype=torch.float64)
    return _tabulate([torch.cat((start, torch.stack(row)), dim=1) for row in rows])


def _tabulate(rows: list[torch.Tensor]) -> Curves:
    """Sort every layer's (3, C) candidates by threshold, make equal ones one, pad to a common length."""
    kept = []
    for row in rows:
        # By threshold, then by share: of equal thresholds the last one names what is really at or below it.
        row = row[:, row[2].argsort(stable=True)]
        row = row[:, row[0].argsort(stable=True)]
        last = torch.ones(row.shape[1], dtype=torch.bool)
        last[:-1] = row[0, 1:] != row[0, :-1]
        kept.append(row[:, last])
    longest = max(row.shape[1] for row in kept)
    padded = torch.stack([torch.cat((row, row[:, -1:].expand(-1, longest - row.shape[1])), dim=1) for row in kept])
    return Curves(padded[:, 0].contiguous(), padded[:, 1].contiguous(), padded[:, 2].contiguous())


def _merge(one: Curves, other: Curves) -> Curves:
    stack = [torch.stack((each.candidates, each.errors, each.shares), dim=1) for each in (one, other)]
    return _tabulate(list(torch.cat(stack, dim=2)))


def _denser(found: Curves, target: float, fine: int) -> list[torch.Tensor]:
    """Per layer, shares between the threshold at the target's budget and its two neighbours."""
    at = found.admissible(found.budget(target))
    steps = torch.arange(1, fine + 1, dtype=torch.float64) / (fine + 1)
    levels = []
    for shares, index in zip(found.shares, at.tolist(), strict=True):
        low, middle = shares[max(0, index - 1)], shares[index]
        high = shares[index + 1] if index + 1 < len(shares) else torch.tensor(1.0, dtype=torch.float64)
        # The largest admissible threshold lies above the one found; a smaller budget may want one below.
        half = steps[: fine // 2] if fine > 1 else steps
        levels.append(torch.cat((low + (middle - low) * half[-1:], middle + (high - middle) * steps)).clamp(max=0.999))
    return levels
