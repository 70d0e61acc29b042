"""Batches at equal memory: how many fit, what the judge makes of them, and the task on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest

from artifact.engine.cache import KVCache
from artifact.engine.prefill import prefill
from artifact.engine.prepare import Prepared
from artifact.kv.catekv import CateKV
from artifact.measure import batch_members, equal_memory, equal_plan
from artifact.projection import teal
from artifact.shapes import known_shape
from artifact.stats import Verdict
from claims import catekv_efficiency
from tests.faults._kv import EMBEDDED, STORED, batches, efficiency_rows
from tests.models_fixture import Loaded, token_ids

CONTEXT, STEPS = 256, 3


def test_batches_that_were_not_timed_say_why() -> None:
    rows = [row for row in efficiency_rows() if row["kind"] not in ("equal_memory", "batch_plan")]
    names = ("throughput at equal memory", "throughput within its bytes")
    reason = {**STORED, "kind": "batch_plan", "reason": "no batch of 2 dense sequences fits"}
    found = {f.predicate.name: f for f in catekv_efficiency.judge([*rows, reason], EMBEDDED)}
    assert all(found[name].verdict is Verdict.NOT_RUN and "dense sequences" in found[name].note for name in names)
    lost = {f.predicate.name: f for f in catekv_efficiency.judge([*rows, reason | {"reason": ""}], EMBEDDED)}
    assert all(lost[name].verdict is Verdict.NOT_RUN for name in names)
    older = {f.predicate.name: f for f in catekv_efficiency.judge(rows, EMBEDDED)}
    assert all(older[name].verdict is Verdict.OBSERVED and "before" in older[name].note for name in names)
    one = [row for row in batches() if row["label"] == "dense"]
    with pytest.raises(ValueError, match="one mode of a memory budget"):
        catekv_efficiency.judge([*rows, *one], EMBEDDED)
    apart = [row | {"interleaved": False} for row in batches()]
    found = {f.predicate.name: f for f in catekv_efficiency.judge([*rows, *apart], EMBEDDED)}
    assert found[names[0]].verdict is Verdict.REPRODUCED and found[names[0]].interval is not None
    assert found[names[0]].interval.point == pytest.approx(7 / 3 * 8.13 / 8.0, rel=0.01)


def test_the_batches_of_the_papers_card() -> None:
    """Three dense sequences and nine of CateKV in 80 GB at 128K; a smaller card gets less, and says so."""
    shape = known_shape("llama-3.1-8b")
    kept = partial(catekv_efficiency.expected_entries, asdict(shape))
    plan = equal_plan.on_card(shape, 131072, kept, 15, 2, 139 << 30)
    assert isinstance(plan, equal_plan.Equal) and (plan.dense, plan.catekv, plan.context) == (3, 9, 131072)
    assert plan.together and plan.budget_bytes == 80e9 and plan.note == ""
    account = catekv_efficiency.account_row(shape)
    assert (account["dense_batch"], account["catekv_batch"]) == (plan.dense, plan.catekv)
    less = equal_plan.on_card(shape, 131072, kept, 15, 2, 79 << 30)
    assert isinstance(less, equal_plan.Equal) and not less.together and less.dense == 2
    assert less.budget_bytes < 65e9 and "in place of the paper's 80" in less.note
    short = equal_plan.on_card(shape, 131072, kept, 15, 2, 48 << 30)
    assert isinstance(short, equal_plan.Equal) and short.context < 131072 and "no dense batch fits" in short.note
    assert "weights" in str(equal_plan.on_card(shape, 131072, kept, 15, 2, 18 << 30))
    many = equal_plan.on_card(shape, 16384, kept, 15, 2, 139 << 30)
    assert many == "dense decoding fills the kernels' 16 sequences at 16,384 tokens; take a larger model"
    tiny = known_shape("smollm2-135m")
    few = equal_plan.small(tiny, 2048, catekv_efficiency.expected_entries(asdict(tiny), 2048), 9, 4, 3)
    assert (few.dense, few.catekv) == (3, 7)


@pytest.fixture(scope="module")
def prepared(tiny: Callable[[str], Loaded]) -> Prepared:
    weights = tiny("llama").weights
    filled = prefill(weights, token_ids(320), query_lengths=(CONTEXT,), rows=16)
    calibration = teal.calibrate(weights, token_ids(200, 9))
    return Prepared(weights, token_ids(400), calibration, filled.cache, filled.queries, "a text")


def wanted(prepared: Prepared, together: bool) -> dict[str, Any]:
    """Parameters of the task for two dense sequences and the CateKV sequences that their memory holds."""
    shape, room = prepared.weights.shape, STEPS + equal_memory.ROOM_STEPS
    method = CateKV(rows=16, sinks=2, recent=8, critical=30)
    heads = shape.layers * shape.kv_heads
    long = int(0.4 * heads + 0.5)
    kept = long * CONTEXT + (heads - long) * method.budget_tokens
    plan = equal_plan.small(shape, CONTEXT, kept, room, 4, 2)
    assert plan.catekv > plan.dense == 2
    return {
        "context": CONTEXT, "timed_steps": STEPS, "batches": {"dense": 2, "catekv": min(5, plan.catekv)},
        "budget_bytes": plan.budget_bytes, "together": together, "adaptive_share": 0.4,
        "methods": [asdict(method), asdict(method)], "order_seed": 0, "note": "",
    }  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("together", [True, False])
def test_both_modes_are_checked_timed_and_counted(
    prepared: Prepared, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_memory, "prepared_for", lambda params, say: prepared)
    params = wanted(prepared, together)
    dense, own = (row for row in equal_memory.timed(params) if "kind" in row)
    assert [dense["label"], own["label"]] == ["dense", "catekv"] and dense["batch"] == 2 < own["batch"]
    assert all(len(row["ms"]) == STEPS and row["gate_error"] < 1e-3 for row in (dense, own))
    assert dense["counted_r_kv"] == 1 and own["counted_r_kv"] < 0.75
    shape = prepared.weights.shape
    capacity = CONTEXT + STEPS + equal_memory.ROOM_STEPS
    one = 2 * shape.layers * shape.kv_heads * capacity * shape.head_dim * 4
    weights = equal_plan.weight_bytes(shape, 4)
    assert dense["storage_bytes"] == 2 * one and dense["held_bytes"] == weights + 2 * one <= params["budget_bytes"]
    assert own["held_bytes"] == weights + own["storage_bytes"] <= params["budget_bytes"]
    entries = dense["kv_bytes"] / (2 * shape.head_dim * 4) / 2 / (shape.layers * shape.kv_heads)
    assert entries == CONTEXT + 1 + equal_memory.WARMUP_STEPS + (STEPS + 1) / 2


@pytest.mark.usefixtures("one_thread")
def test_too_much_memory_or_one_storage_for_two_is_an_error(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_memory, "prepared_for", lambda params, say: prepared)
    params = wanted(prepared, True)
    with pytest.raises(RuntimeError, match="were to be its memory"):
        list(equal_memory.timed(params | {"budget_bytes": 10**6}))

    def shared(prepared: Prepared, batch: int, capacity: int, own: bool = False) -> list[KVCache]:
        return [prepared.cache.fork(min(capacity, 256), capacity)] * batch

    monkeypatch.setattr(batch_members, "lanes", shared)
    with pytest.raises(RuntimeError, match="2 sequences of dense lie in 1 storages"):
        list(equal_memory.timed(params))


def test_weights_are_counted_once_whatever_is_tied(prepared: Prepared) -> None:
    weights = prepared.weights
    assert equal_memory.weights_of(weights) == equal_plan.weight_bytes(weights.shape, 4)
