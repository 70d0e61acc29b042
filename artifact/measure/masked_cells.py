"""The measuring tasks of the gate-mask claims: windows scored under arms, and a calibration counted again.

Before windows are scored, the arm that uses most is checked against real decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from artifact.engine import models, teacher
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prefill import prefill
from artifact.measure import quality
from artifact.measure.masked_bench import LEAST_HELD_OUT, MaskedBench, losses, open_bench
from artifact.measure.masked_plan import Arm, Sizes, arm_of, sizes_of
from artifact.measure.quality_cells import profile_params
from artifact.projection import gate_stats
from artifact.projection.dense import linear
from artifact.projection.gate_stats import Reservoir
from artifact.projection.masked import GateMask, MaskedRows
from artifact.projection.teal import hash_tokens
from artifact.records import Cell, Run

Row = dict[str, Any]
CHECKED_STEPS, CHECKED_WINDOWS = 8, 3


def score_cell(run: Run, claim: str, key: str, sizes: Sizes, arms: Sequence[Arm]) -> Cell:
    """A cell that scores every window of the protocol under every arm."""
    params = profile_params(run.profile) | {"sizes": sizes.record(), "arms": [arm.record() for arm in arms]}
    return Cell(claim, key, "artifact.measure.masked_cells:scored", params, timeout_s=7200.0)


def recount_cell(run: Run, claim: str, sizes: Sizes, targets: Sequence[float]) -> Cell:
    """A cell that counts sparsity and local errors of SATS thresholds again."""
    params = profile_params(run.profile) | {"sizes": sizes.record(), "targets": list(targets)}
    return Cell(claim, "recount", "artifact.measure.masked_cells:recounted", params, timeout_s=7200.0)


def opened(params: Row, said: list[Row]) -> MaskedBench:
    """The bench of a cell's parameters; what it says it is doing is left in `said`."""
    place = (params["model"], params["text"], params["device"], params["dtype"])
    return open_bench(
        *place, sizes_of(params["sizes"]), lambda share, doing: said.append({"progress": share, "doing": doing})
    )


def scored(params: Row) -> Iterator[Row]:
    """Task: one row per window and arm: nll of its tokens, what was dropped and read."""
    said: list[Row] = []
    yield {"progress": 0.0, "doing": "loading and calibrating"}
    bench = opened(params, said)
    yield from windows_scored(bench, [arm_of(record) for record in params["arms"]])


def windows_scored(bench: MaskedBench, arms: Sequence[Arm], kind: str = "window") -> Iterator[Row]:
    """Yield one row of this kind per window and arm."""
    protocol, source = bench.sizes.protocol, bench.evaluation_text
    cut = quality.windows(bench.tokenizer, source.text, protocol, source.name)
    bench.require_apart(cut.tokens)
    if any(arm.share < 1 for arm in arms):
        yield {"progress": 0.1, "doing": "losses of both paths on the routing corpus"}
    read = cut.tokens[:, protocol.context_tokens : -1].flatten()
    branches = {arm.label: bench.branch(arm, read) for arm in arms}
    held_out = {arm.label: bench.held_out_share(arm) for arm in arms if arm.share < 1 and arm.table == "scores"}
    busiest = max(arms, key=lambda arm: (arm.method != "dense") + (arm.share < 1) + bool(arm.adapter))
    difference = check_steps(_steppable(bench), branches[busiest.label], cut.tokens)
    for index, window in enumerate(cut.tokens):
        yield {"progress": index / len(cut.tokens), "doing": f"window {index + 1} of {len(cut.tokens)}"}
        cache = prefill(bench.weights, window[: protocol.context_tokens]).cache
        for arm in arms:
            row = _score(bench.weights, cache, window, branches[arm.label])
            yield (
                row
                | arm.record()
                | {
                    "label": arm.label,
                    "kind": kind,
                    "dtype": str(bench.weights.dtype).removeprefix("torch."),
                    "window": index,
                    "protocol": cut.hash,
                    "window_tokens_hash": hash_tokens(window),
                    "budget": bench.calibration.curves.budget(arm.sparsity) if arm.method == "sats" else None,
                    "scored": protocol.scored_tokens,
                    "text": bench.text_label,
                    "identity": bench.weights.identity,
                    "calibration": bench.calibration.origin.tokens_hash,
                    "calibration_tokens": bench.calibration.origin.tokens,
                    "held_out_share": held_out.get(arm.label),
                    "stepwise_difference_nats": difference,
                }
            )


def _steppable(bench: MaskedBench) -> MaskedBench:
    """The bench whose weights decode steps can read: a CPU's hold float32 alone and take the same numbers so."""
    return bench if bench.weights.device.type == "cuda" else replace(bench, weights=models.widened(bench.weights))


def _score(weights: Weights, cache: Any, window: torch.Tensor, branch: Any) -> Row:
    """nll of a window behind its dense prefill, sparsity over layers and tokens, share of tokens on the masked path."""
    context = cache.tokens
    given = window[context:-1]
    rows = None if branch is None else branch.rows(weights)
    block = teacher.forward(weights, cache, given, None if rows is None else _Started(rows))
    nll = teacher.token_nll(weights, block.hidden, window[context + 1 :].to(weights.device))
    row: Row = {"nll": nll.tolist(), "counted_r_p": block.r_p, "counted_sparsity": 0.0, "masked_share": 0.0}
    if isinstance(rows, MaskedRows):
        row |= {"counted_sparsity": rows.sparsity, "layer_sparsity": rows.layer_sparsity()}
        row["masked_share"] = float(rows.branch.takes_masked_path(given).double().mean())
    return row


class _Started:
    """A branch whose pass has been started already, so that its counts can be read afterwards."""

    def __init__(self, rows: MaskedRows) -> None:
        self._rows = rows

    def rows(self, weights: Weights) -> MaskedRows:
        return self._rows

    def bind(self, weights: Weights, buffers: Any) -> Any:
        raise TypeError("a started pass is not a decoder's branch")


def check_steps(bench: MaskedBench, branch: Any, windows: torch.Tensor) -> float:
    """Return the mean difference in nats between one pass and real decode steps, on the first of windows (w, n) where
    it is within rounding. Raises RuntimeError when there is none among CHECKED_WINDOWS.

    It is 1e-5 in most windows. In one of thirty a channel lies within rounding of its threshold and falls on the other
    side, which moves the mean by up to 0.06; a fault of pass or steps shows in every window.
    """
    tolerance, found = quality.tolerance_nats(bench.weights.dtype, thresholded=True), []
    for window in windows[:CHECKED_WINDOWS]:
        found.append(difference_nats(bench, branch, window))
        if found[-1] <= tolerance:
            return found[-1]
    raise RuntimeError(f"scoring in one pass differs from decode steps by {min(found):.2e} nats or more")


def difference_nats(bench: MaskedBench, branch: Any, window: torch.Tensor) -> float:
    """Mean over CHECKED_STEPS tokens of the distance between their losses in one pass and in decode steps."""
    context, steps = bench.sizes.protocol.context_tokens, CHECKED_STEPS
    given = window[: context + steps + 1].to(bench.weights.device)
    passed = losses(bench.weights, given, context, branch)
    cache = prefill(bench.weights, given[:context], context + steps).cache
    decoder = Decoder(bench.weights, cache, given, branch)
    stepped = []
    for step in range(steps):
        decoder.step()
        stepped.append(functional.cross_entropy(decoder.logits.double(), given[context + step + 1]))
    return float((torch.stack(stepped) - passed).abs().mean())


def recounted(params: Row) -> Iterator[Row]:
    """Task: per target, the sparsity of a dense pass over the calibration tokens under the thresholds, exactly counted,
    and every layer's error on the sampled positions, thresholded outputs formed in full; both on held-out text, too.
    """
    said: list[Row] = []
    yield {"progress": 0.0, "doing": "loading and calibrating"}
    bench = opened(params, said)
    targets = [float(target) for target in params["targets"]]
    budgets = [bench.calibration.curves.budget(target) for target in targets]
    masks = [bench.calibration.mask("sats", target) for target in targets]
    rows = bench.calibration.origin.rows
    yield {"progress": 0.4, "doing": "counting again on calibration and held-out text"}
    own = recount(bench.weights, bench.sequences(bench.calibration_tokens), masks, rows)
    held_out = bench.held_out[: min(LEAST_HELD_OUT, bench.sizes.calibration // 2)]
    other = recount(bench.weights, bench.sequences(held_out), masks, rows)
    for index, target in enumerate(targets):
        yield {
            "kind": "recount",
            "target": target,
            "budget": budgets[index],
            "expected_sparsity": bench.calibration.curves.sparsity(budgets[index]),
            "layer_sparsity": own[0][index],
            "layer_errors": own[1][index],
            "held_out_sparsity": other[0][index],
            "held_out_errors": other[1][index],
            "limits": masks[index].limits.tolist(),
            "tokens": bench.calibration.origin.tokens,
            "text": bench.text_label,
            "identity": bench.weights.identity,
        }


@torch.inference_mode()
def recount(
    weights: Weights, sequences: Sequence[torch.Tensor], masks: Sequence[GateMask], rows: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return, per mask and layer, the share dropped over all tokens and the mean relative error of sampled ones."""
    layers = weights.shape.layers
    dropped = torch.zeros(len(masks), layers, dtype=torch.float64)
    lost, seen = torch.zeros_like(dropped), 0
    sampled: dict[int, torch.Tensor] = {}
    reservoir = Reservoir(rows)
    for tokens in sequences:
        slots = torch.cat((torch.full((gate_stats.SKIP,), -1), reservoir.slots(len(tokens) - gate_stats.SKIP)))
        done = [0] * layers

        def observe(index: int, site: str, x: torch.Tensor, slots: Any = slots, done: Any = done) -> None:
            if site != "gate_up":
                return
            start = done[index]
            done[index] += x.shape[0]
            size = gate_stats.silu_gate(weights.layers[index], x[max(0, gate_stats.SKIP - start) :]).abs()
            for number, mask in enumerate(masks):
                dropped[number, index] += float((size <= mask.limits[index].to(size.device)).sum())
            own = slots[start : start + x.shape[0]]
            held = sampled.setdefault(index, torch.empty(rows, x.shape[1], device=x.device))
            held[own[own >= 0].to(x.device)] = x[(own >= 0).to(x.device)]

        prefill(weights, tokens, observe=observe)
        seen += len(tokens) - gate_stats.SKIP
    for index, x in sampled.items():
        lost[:, index] = _errors(weights, index, x[: min(rows, seen)], masks)
    return (dropped / (seen * weights.shape.intermediate)).tolist(), lost.tolist()


def _errors(weights: Weights, index: int, x: torch.Tensor, masks: Sequence[GateMask]) -> torch.Tensor:
    """Return (masks,): the mean of |y - y_t| / |y| with y_t computed as the step computes it."""
    layer = weights.layers[index]
    gate, up = linear(x, layer.gate_up).chunk(2, dim=-1)
    silu = functional.silu(gate)
    y = linear(silu * up, layer.down)
    found = []
    for mask in masks:
        kept = torch.where(silu.abs() > mask.limits[index].to(silu.device), silu * up, torch.zeros_like(up))
        found.append(float(((y - linear(kept, layer.down)).norm(dim=-1) / y.norm(dim=-1)).double().mean()))
    return torch.tensor(found, dtype=torch.float64)
