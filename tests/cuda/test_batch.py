"""A batched step on the Triton kernels: against its sequences alone, and replayed from a CUDA graph.

Without a GPU the list of launches stands in for the graph: it, too, is made once and replayed.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from artifact.engine.batch import BatchDecoder
from artifact.engine.batch_check import check_step
from artifact.engine.prepare import Prepared, prepare_synthetic
from artifact.kv.catekv import CateKV
from artifact.measure import batch_cells, batch_members, equal_memory
from artifact.shapes import Shape

SHAPE = Shape("tiny", 96, 2, 6, 2, 32, 160, 211, 1024, False)
OPS = (
    "attention", "batched_gemv", "batched_sparse_gemv", "gate_up", "gather", "gemv", "ragged", "rope_append", "score",
    "silu_product", "sparse_gemv", "token",
)  # fmt: skip
CONTEXT, STEPS, BATCH = 64, 2, 3
METHOD = CateKV(rows=16, sinks=2, recent=8, critical=30)
MODES = ["dense", "projection", "kv", "both", "catekv"]
ON_A_GPU = torch.cuda.is_available()
# In the interpreter a step takes seconds: there those two whose code holds that of the others.
BUSIEST = MODES if ON_A_GPU else ["both", "catekv"]


@pytest.fixture(scope="module")
def prepared(device: torch.device) -> Iterator[Prepared]:
    """A small synthetic model on the Triton kernels, in the interpreter where there is no GPU."""
    patch = pytest.MonkeyPatch()
    if not torch.cuda.is_available():
        for op in OPS:
            patch.setattr(f"kernels.{op}.backend", lambda op, tensor: importlib.import_module(f"kernels.cuda.{op}"))
    yield prepare_synthetic(SHAPE, device.type, torch.float16, 320)
    patch.undo()


def batch_of(prepared: Prepared, mode: str) -> BatchDecoder:
    room = STEPS + 2
    if mode == "catekv":
        return BatchDecoder(prepared.weights, batch_members.catekv(prepared, BATCH, CONTEXT, METHOD, 0.4, room))
    lanes = batch_members.lanes(prepared, BATCH, CONTEXT + room)
    r_p = 0.5 if mode in ("projection", "both") else 1.0
    made = batch_members.snapkv(prepared, lanes, CONTEXT, 0.3 if mode in ("kv", "both") else 1.0, room)
    return BatchDecoder(prepared.weights, made, prepared.calibration.thresholds(r_p) if r_p < 1 else None)


@pytest.mark.parametrize("mode", BUSIEST)
def test_a_batched_step_is_that_of_its_sequences_alone(prepared: Prepared, mode: str) -> None:
    assert check_step(batch_of(prepared, mode)) < (0.15 if mode in ("projection", "both") else 5e-3)


@pytest.mark.parametrize("mode", BUSIEST)
def test_a_captured_batch_decodes_what_an_eager_one_does(prepared: Prepared, mode: str) -> None:
    """A length, position, token or row of one sequence that was baked in at the capture would show a step later."""
    eager, replayed = batch_of(prepared, mode), batch_of(prepared, mode)
    for decoder in (eager, replayed):
        decoder.step()
    if prepared.weights.device.type == "cuda":
        replayed.capture()
    first = replayed.logits.clone()
    for _ in range(STEPS):
        eager.step()
        replayed.step()
        assert torch.equal(eager.logits, replayed.logits)
    assert not torch.equal(replayed.logits, first)
    assert [one.cache.tokens for one in replayed.sequences] == [CONTEXT + STEPS + 1] * BATCH
    assert dataclasses.asdict(replayed.counted()) == dataclasses.asdict(eager.counted())


def test_two_sequences_that_share_a_cache_are_found(prepared: Prepared) -> None:
    """Values differ between sequences, so that reading a neighbour's cache is seen by the check."""
    decoder = batch_of(prepared, "kv")
    ops = [index for index, op in enumerate(decoder.ops) if op.name == "attention"]
    other = batch_of(prepared, "kv")
    first, second = decoder.sequences[0].packed, other.sequences[1].packed
    assert first is not None and second is not None
    assert not torch.equal(first.entries(0).values, second.entries(0).values)
    mixed = BatchDecoder(
        prepared.weights,
        [decoder.sequences[0], dataclasses.replace(decoder.sequences[1], packed=decoder.sequences[0].packed)],
    )
    honest = BatchDecoder(prepared.weights, decoder.sequences[:2])
    honest._launches[ops[1]] = mixed._launches[ops[1]]
    with pytest.raises(RuntimeError, match="differs from that of the sequence alone"):
        check_step(honest)


@pytest.mark.skipif(not ON_A_GPU, reason="on a CPU tests/test_batching.py does it with the CPU's kernels")
def test_groups_of_batches_are_captured_timed_and_counted(prepared: Prepared) -> None:
    group = [(64, 1.0, 1.0, "sweep"), (64, 0.5, 1.0, "sweep"), (128, 1.0, 0.3, "crossing")]
    dense, sparse, kept = batch_cells.measure(prepared, 2, group, 2)
    assert dense["u_b"] == 1 and sparse["counted_r_p"] < sparse["u_b"] < 1 and 0.28 < kept["counted_r_kv"] < 0.4
    assert [row["mode"] for row in (dense, sparse, kept)] == ["dense", "projection", "kv"]
    assert all(len(row["ms"]) == 2 and row["gate_error"] < 0.15 for row in (dense, sparse, kept))


@pytest.mark.parametrize("together", [True, False] if ON_A_GPU else [False])
def test_both_modes_hold_what_they_say_in_equal_memory(
    prepared: Prepared, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU what was allocated with a mode is counted, buffers and workspaces included."""
    monkeypatch.setattr(equal_memory, "prepared_for", lambda params, say: prepared)
    params = {
        "context": CONTEXT, "timed_steps": 1, "batches": {"dense": 2, "catekv": 3}, "budget_bytes": 64 << 20,
        "together": together, "adaptive_share": 0.4, "methods": [dataclasses.asdict(METHOD)] * 2, "order_seed": 0,
        "note": "",
    }  # fmt: skip
    dense, own = (row for row in equal_memory.timed(params) if "kind" in row)
    weights = equal_memory.weights_of(prepared.weights)
    for row in (dense, own):
        assert weights + row["storage_bytes"] <= row["held_bytes"] <= row["budget_bytes"]
        assert row["gate_error"] < 5e-3 and row["interleaved"] is together
    assert dense["batch"] == 2 and own["batch"] == 3 and own["counted_r_kv"] < dense["counted_r_kv"] == 1
