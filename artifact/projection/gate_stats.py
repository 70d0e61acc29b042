"""What gate-mask calibration looks at: the distribution of |SiLU(gate)| per layer and a sample of MLP inputs.

Both are collected in a stream of token sequences, in memory that does not grow with their number: the distribution is
a histogram of constant relative width, the sample a uniform reservoir of token positions, the same in every layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from artifact.engine.models import Layer, Weights
from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.projection.dense import linear
from artifact.projection.magnitudes import Magnitudes

SAMPLE_ROWS = 512  # token positions whose MLP output errors are averaged
LEVELS = 1000  # quantiles are tabulated at every 0.1% of the activations
SKIP = 4  # the first tokens of a sequence are attention sinks with activations far outside the rest


@dataclass(frozen=True)
class GateStatistics:
    """gates: |SiLU(gate)| of every layer. inputs (L, rows, H): normed MLP inputs of sampled positions. tokens: how many
    were seen; tokens_hash names the stream.
    """

    gates: tuple[Magnitudes, ...]
    inputs: torch.Tensor
    tokens: int
    tokens_hash: str


class Reservoir:
    """A uniform sample of `rows` positions of a stream (algorithm R), decided before a position's values are known."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows = rows
        self.seen = 0
        self._generator = torch.Generator().manual_seed(seed)

    def slots(self, count: int) -> torch.Tensor:
        """Return (count,) int64: the slot that each of the next positions takes, -1 for none; a slot is given once."""
        at = torch.arange(self.seen, self.seen + count)
        draw = (torch.rand(count, generator=self._generator, dtype=torch.float64) * (at + 1)).long()
        slots = torch.where(at < self.rows, at, torch.where(draw < self.rows, draw, -1))
        self.seen += count
        # Of several positions for one slot the last one stays, as if they had come one at a time.
        last = torch.full((self.rows,), -1)
        for position, slot in enumerate(slots.tolist()):
            if slot >= 0:
                last[slot] = position
        final = torch.full((count,), -1)
        taken = last >= 0
        final[last[taken]] = taken.nonzero()[:, 0]
        return final


def collect(
    weights: Weights, sequences: Iterable[torch.Tensor], rows: int = SAMPLE_ROWS, skip: int = SKIP
) -> GateStatistics:
    """Stream dense prefills of `sequences` (n,) without their first `skip` tokens. UserError when nothing is left."""
    shape = weights.shape
    gates = tuple(Magnitudes() for _ in range(shape.layers))
    inputs = torch.empty(shape.layers, rows, shape.hidden, device=weights.device)
    reservoir, digest = Reservoir(rows), hashlib.sha256()
    for tokens in sequences:
        digest.update(tokens.cpu().numpy().astype("<i8").tobytes())
        if tokens.shape[0] > skip:
            slots = torch.cat((torch.full((skip,), -1), reservoir.slots(int(tokens.shape[0]) - skip)))
            _observe(weights, tokens, slots.to(weights.device), skip, gates, inputs)
    if reservoir.seen == 0:
        raise UserError(f"no calibration sequence is longer than {skip} tokens; give a longer text")
    kept = inputs[:, : min(rows, reservoir.seen)].contiguous()
    return GateStatistics(gates, kept, reservoir.seen, digest.hexdigest()[:16])


def _observe(
    weights: Weights,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    skip: int,
    gates: tuple[Magnitudes, ...],
    inputs: torch.Tensor,
) -> None:
    """One prefill: add its gates, write its sampled rows."""
    done = [0] * weights.shape.layers

    def observe(index: int, site: str, x: torch.Tensor) -> None:
        if site != "gate_up":
            return
        start = done[index]
        done[index] += x.shape[0]
        own = slots[start : start + x.shape[0]]
        inputs[index, own[own >= 0]] = x[own >= 0]
        gates[index].add(silu_gate(weights.layers[index], x[max(0, skip - start) :]))

    prefill(weights, tokens, observe=observe)


def quantile_table(gate: Magnitudes) -> torch.Tensor:
    """Return (LEVELS + 1,): the quantiles of one layer's |SiLU(gate)| at equal steps of the share."""
    return gate.quantile(torch.linspace(0.0, 1.0, LEVELS + 1, dtype=torch.float64))


def shares_dropped(gate: Magnitudes, limits: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """Return (C,) float64: the share of a layer's activations at or below each limit (C,), which are its quantiles at
    `asked` (C,). More than asked where many activations are equal, to one level.
    """
    below = torch.searchsorted(quantile_table(gate), limits, right=True)
    return torch.maximum(asked, (below - 1).clamp(min=0).double() / LEVELS)


def silu_gate(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Return (m, I): SiLU of the gate of normed MLP inputs x (m, H)."""
    width = layer.gate_up.w.shape[0] // 2
    return functional.silu(functional.linear(x.to(layer.gate_up.w.dtype), layer.gate_up.w[:width]).float())


@torch.inference_mode()
def errors(layer: Layer, x: torch.Tensor, candidates: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return (C,) float64: Err(t) of sats equation 6 for thresholds `candidates` (C,) on normed MLP inputs x (m, H):
    the mean over tokens of |y - y_t| / (|y| + epsilon), y the dense MLP output, y_t that without the channels whose
    |SiLU(gate)| is at or below t.
    """
    gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
    silu = functional.silu(gate)
    act, size = silu * up, silu.abs()
    scale = linear(act, layer.down).norm(dim=-1).double() + epsilon
    found = torch.empty(candidates.shape[0], dtype=torch.float64)
    for index, limit in enumerate(candidates.tolist()):
        # The output is linear in act, so what is lost is the output of the dropped channels alone.
        dropped = torch.where(size <= limit, act, torch.zeros_like(act)).to(layer.down.w.dtype)
        lost = functional.linear(dropped, layer.down.w).float()
        found[index] = (lost.norm(dim=-1).double() / scale).mean()
    return found
