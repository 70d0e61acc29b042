"""What policies of choosing a mode per request cost on a request mix (crossover, section 5.4, Table 5). Pure.

A policy is told the lengths of a request and names a mode. It is priced with step times of one block (one process);
the latency gate decides by the mean of the other blocks' times, so that no time both chooses and prices. The oracle
decides by the pricing block itself: nothing can be cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artifact.account import Mode, Setting, n_star
from artifact.deploy.gate_costs import Costs, costs_from, step_times
from artifact.deploy.mix import Mix
from artifact.shapes import Shape

Row = Mapping[str, Any]
Decode = tuple[str, int, int]  # kind, prompt tokens, new tokens
Policy = Callable[[int, int], Mode]
FIXED = {
    "always dense": Mode.DENSE,
    "always projection": Mode.PROJECTION,
    "always selection": Mode.KV,
    "always compose": Mode.BOTH,
}
BYTE_GATE, LATENCY_GATE, ORACLE = "byte gate", "latency gate", "oracle"
POLICIES = (*FIXED, BYTE_GATE, LATENCY_GATE, ORACLE)


@dataclass(frozen=True)
class Block:
    """Times of one process: quiet step ms per mode and context, one-time ms as (context, ms)."""

    contexts: tuple[int, ...]
    step_ms: Mapping[Mode, tuple[float, ...]]
    once_ms: tuple[tuple[int, float], ...]
    r_kv: float

    def costs(self) -> Costs:
        return costs_from(self.contexts, self.step_ms, self.once_ms, self.r_kv)


@dataclass(frozen=True)
class Times:
    """Blocks of one machine and model. `machine` names a recorded run; empty for what was measured in this one."""

    machine: str
    shape: Shape
    setting: Setting
    blocks: tuple[Block, ...]


def times_from(rows: Sequence[Row]) -> Times:
    """The blocks in stored rows of kind `times`, all of one machine, ordered by block.

    Raises ValueError when they were measured at different contexts or for different models.
    """
    ordered = sorted(rows, key=lambda row: int(row["block_of"]))
    first = ordered[0]
    if any((row["contexts"], row["shape"], row["r_kv"]) != (first["contexts"], first["shape"], first["r_kv"])
           for row in ordered):  # fmt: skip
        raise ValueError("blocks of different contexts, models or keep ratios cannot be averaged")
    setting = Setting(first["r_p"], first["r_kv"], weight_bits=first["weight_bits"], kv_bits=first["kv_bits"])
    return Times(first["machine"], Shape(**first["shape"]), setting, tuple(_block(row) for row in ordered))


def times_row(machine: str, block: int, sweep: Sequence[Row], once_ms: Mapping[int, float]) -> dict[str, Any]:
    """One row of kind `times` from step rows of one process and its one-time costs by context.

    Raises ValueError when a context lacks a mode or arms hold different numbers of steps.
    """
    contexts, step_ms = step_times(sweep)
    both = next(row for row in sweep if row["mode"] == Mode.BOTH)
    return {
        "kind": "times",
        "machine": machine,
        "block_of": block,
        "contexts": contexts,
        "step_ms": {mode.value: times for mode, times in step_ms.items()},
        "once_ms": [[n, once_ms[n]] for n in sorted(once_ms)],
        **{key: both[key] for key in ("r_p", "r_kv", "shape", "weight_bits", "kv_bits")},
    }


def _block(row: Row) -> Block:
    steps = {Mode(mode): tuple(map(float, times)) for mode, times in row["step_ms"].items()}
    once = tuple((int(n), float(ms)) for n, ms in row["once_ms"])
    return Block(tuple(row["contexts"]), steps, once, float(row["r_kv"]))


def mean_block(blocks: Sequence[Block]) -> Block:
    """The mean of all times, context by context."""
    first, share = blocks[0], 1.0 / len(blocks)
    steps = {
        mode: tuple(share * sum(block.step_ms[mode][i] for block in blocks) for i in range(len(first.contexts)))
        for mode in first.step_ms
    }
    once = tuple((n, share * sum(block.once_ms[i][1] for block in blocks)) for i, (n, _) in enumerate(first.once_ms))
    return Block(first.contexts, steps, once, first.r_kv)


def cheapest(costs: Costs) -> Policy:
    """The policy that picks the cheapest mode by these costs."""
    return lambda prompt, new: min(Mode, key=lambda mode: costs.request_ms(mode, prompt, new))


def by_bytes(times: Times) -> Policy:
    """The branch that removes more bytes: projections below the byte crossover, the selection from there on."""
    crossing = n_star(times.shape, times.setting)
    return lambda prompt, new: Mode.PROJECTION if prompt < crossing else Mode.KV


def policies(times: Times, pricing: int) -> dict[str, Policy]:
    """Every policy as it would decide when block `pricing` prices it. At least two blocks are needed."""
    others = [block for i, block in enumerate(times.blocks) if i != pricing]
    if not others:
        raise ValueError("one block cannot both calibrate a gate and price it")
    fixed = {name: (lambda prompt, new, mode=mode: mode) for name, mode in FIXED.items()}
    return {
        **fixed,
        BYTE_GATE: by_bytes(times),
        LATENCY_GATE: cheapest(mean_block(others).costs()),
        ORACLE: cheapest(times.blocks[pricing].costs()),
    }


def priced(times: Times, decodes: Sequence[Decode]) -> list[dict[str, float]]:
    """Per block, the total ms of the mix under every policy."""
    found = []
    for index, block in enumerate(times.blocks):
        costs = block.costs()
        total = {
            name: sum(costs.request_ms(policy(prompt, new), prompt, new) for _, prompt, new in decodes)
            for name, policy in policies(times, index).items()
        }
        found.append(total)
    return found


def chosen(times: Times, decodes: Sequence[Decode]) -> dict[Mode, float]:
    """Share of the decodes that the latency gate, calibrated on all blocks, sends to each mode."""
    policy = cheapest(mean_block(times.blocks).costs())
    picks = [policy(prompt, new) for _, prompt, new in decodes]
    return {mode: picks.count(mode) / len(picks) for mode in Mode}


def speedups(totals: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Per policy, its speedup over always decoding densely in every block."""
    return {name: [total["always dense"] / total[name] for total in totals] for name in totals[0]}


def gate_over_best(totals: Sequence[Mapping[str, float]]) -> list[float]:
    """Per block, the cheapest fixed policy's time over the latency gate's."""
    return [min(total[name] for name in FIXED) / total[LATENCY_GATE] for total in totals]


def composition_share(totals: Sequence[Mapping[str, float]]) -> list[float]:
    """Per block, the gain of always composing over that of the gate, both gains over dense decoding."""
    ratios = []
    for total in totals:
        gain = total["always dense"] / total[LATENCY_GATE] - 1
        own = total["always dense"] / total["always compose"] - 1
        ratios.append(own / gain if gain > 0 else float("nan"))
    return ratios


def decodes_for(mix: Mix, times: Times) -> list[Decode]:
    """The decodes of a mix scaled to the model's window, as far as that was measured.

    A device whose memory ends below the window serves requests only up to there.
    """
    return mix.decodes(min(times.shape.window, times.blocks[0].contexts[-1]))
