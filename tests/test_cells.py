"""The measuring task on a small synthetic model: honest rows, and engine faults that must end a cell as an error."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from artifact.engine import attention_paths, decoder, reference, timing
from artifact.engine.decoder import Decoder
from artifact.engine.prepare import Prepared, grid, prepare_synthetic
from artifact.measure import cells
from artifact.measure.cells import member
from artifact.projection.thresholds import ThresholdedSteps, Thresholds
from artifact.shapes import Shape
from kernels import sparse_gemv
from kernels.bandwidth import Bandwidth

SHAPE = Shape("tiny", 96, 2, 6, 2, 32, 160, 211, 1024, False)
STEPS = 4


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare_synthetic(SHAPE, "cpu", torch.float32, 512 + STEPS + cells.EXTRA_STEPS)


def measure(prepared: Prepared, *members: dict[str, Any]) -> list[dict[str, Any]]:
    return cells.measure_group(prepared, list(members), STEPS)


def test_rows_hold_paired_samples_and_what_the_step_counted(prepared: Prepared) -> None:
    rows = measure(prepared, member(256), member(256, 0.5), member(256, 1.0, 0.3), member(512, 0.5, 0.3))
    assert [row["mode"] for row in rows] == ["dense", "projection", "kv", "both"]
    assert {len(row["ms"]) for row in rows} == {STEPS}
    dense, sparse, kv, both = rows
    weights = SHAPE.layers * SHAPE.projection_params * 4
    assert dense["projection_bytes"] == weights and dense["counted_r_kv"] == 1.0
    assert sparse["projection_bytes"] == pytest.approx(weights * sparse["counted_r_p"])
    assert abs(sparse["counted_r_p"] - 0.5) <= cells.KEEP_TOLERANCE
    # 77 of 256 entries were kept; the timed steps are number 5 to 8 after the prompt and each appends one entry first.
    entries = 77 + 1 + cells.WARMUP_STEPS + (STEPS + 1) / 2
    assert kv["kv_bytes"] == entries * SHAPE.layers * SHAPE.kv_values_per_token * 4
    full = 256 + 1 + cells.WARMUP_STEPS + (STEPS + 1) / 2
    assert dense["kv_bytes"] == full * SHAPE.layers * SHAPE.kv_values_per_token * 4
    assert both["context"] == 512 and both["counted_r_kv"] == pytest.approx(0.3, abs=0.02)
    assert all(row["gate_error"] < 1e-5 for row in rows)


def test_attention_paths_agree_and_name_their_backend(prepared: Prepared) -> None:
    rows = measure(prepared, *(member(256, path=path) for path in attention_paths.PATHS))
    assert [row["attention_backend"].split()[0] for row in rows] == ["numba", "torch", "torch"]
    assert all(row["gate_error"] < 1e-5 for row in rows)


def test_fault_24_a_fused_path_that_runs_plain_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *a, **k: int(attention_paths.SDPBackend.MATH.value))
    query, keys = torch.randn(6, 32), torch.randn(2, 8, 32)
    with pytest.raises(RuntimeError, match="math backend"):
        attention_paths.backend_name("fused", query, keys, torch.full((2,), 3, dtype=torch.int32))


def test_fault_17_a_mode_that_silently_reads_all_weights_is_an_error(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = Thresholds(torch.full((SHAPE.layers, 7), -1.0), 0.5, "none")
    monkeypatch.setattr(type(prepared.calibration), "thresholds", lambda self, keep: everything)
    with pytest.raises(RuntimeError, match=r"projection keep 0.5 was asked for, 1.000 was read"):
        measure(prepared, member(256, 0.5))


def test_fault_32_a_kv_ratio_that_is_ignored_is_an_error(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    select = cells.SnapKV.select
    monkeypatch.setattr(cells.SnapKV, "select", lambda self, full, q, keep, *rest: select(self, full, q, 0.6, *rest))
    with pytest.raises(RuntimeError, match="cache entries were expected"):
        measure(prepared, member(256, 1.0, 0.3))


def test_a_wrong_mask_fails_the_gate(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = sparse_gemv.bind

    def shifted(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> Any:
        return bind(x, w.roll(1, 0).contiguous(), *rest)  # every channel reads its neighbour's row

    monkeypatch.setattr(sparse_gemv, "bind", shifted)
    with pytest.raises(RuntimeError, match="differs from its reference"):
        measure(prepared, member(256, 0.5))


def test_a_wrong_rotary_position_fails_the_gate(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = decoder.attention.bind_step
    monkeypatch.setattr(decoder.attention, "bind_step", lambda qkv, freq, *rest: bind(qkv, freq * 1.5, *rest))
    with pytest.raises(RuntimeError, match="appended key of layer 0 differs from its reference"):
        measure(prepared, member(256))


def test_a_wrong_rotary_position_ahead_of_a_library_fails_the_gate(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = decoder.rope_append.bind
    monkeypatch.setattr(decoder.rope_append, "bind", lambda qkv, freq, *rest: bind(qkv, freq * 1.5, *rest))
    with pytest.raises(RuntimeError, match="differs from its reference"):
        measure(prepared, member(256, path="masked"))


def test_attention_off_by_one_entry_fails_the_gate(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = decoder.attention.bind_step

    def short(qkv: Any, freq: Any, at: Any, full: Any, packed: Any, lengths: torch.Tensor, *rest: Any) -> Any:
        return bind(qkv, freq, at, full, packed, lengths - 1, *rest)

    monkeypatch.setattr(decoder.attention, "bind_step", short)
    with pytest.raises(RuntimeError, match="attention of layer 0 differs from its reference"):
        measure(prepared, member(256))


@pytest.mark.parametrize("site", ["qkv", "head"])
def test_a_norm_that_is_left_out_fails_the_gate(prepared: Prepared, monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    bind = decoder.gemv.bind
    rows = {"qkv": 320, "head": SHAPE.vocab}[site]

    def bare(x: Any, w: torch.Tensor, y: Any, bias: Any = None, norm: Any = None, accumulate: bool = False) -> Any:
        return bind(x, w, y, bias, None if w.shape[0] == rows else norm, accumulate)

    monkeypatch.setattr(decoder.gemv, "bind", bare)
    with pytest.raises(RuntimeError, match=rf"({site}|logits).*differs from its reference"):
        measure(prepared, member(256))


def test_a_residual_that_is_replaced_instead_of_added_to_fails_the_gate(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = decoder.gemv.bind
    monkeypatch.setattr(decoder.gemv, "bind", lambda *all, **named: bind(*all[:5], **named))
    with pytest.raises(RuntimeError, match="o of layer 0 differs from its reference"):
        measure(prepared, member(256))


@pytest.mark.parametrize(("close", "passes"), [(1e-6, True), (1e-3, False)])
def test_only_a_channel_within_rounding_of_its_threshold_may_fall_on_either_side(
    prepared: Prepared, close: float, passes: bool
) -> None:
    """The kernel gets thresholds one channel away from those that the gate holds it to."""
    sparse = cells.build(prepared, member(256, 0.5), STEPS)
    x = prepared.weights.embedding[sparse.tokens[256]]
    normed = (x * torch.rsqrt((x * x).mean() + prepared.weights.eps)).abs()
    nth = float(normed.sort().values[len(normed) // 2])
    assert isinstance(sparse.projection, Thresholds) and isinstance(sparse.projections, ThresholdedSteps)
    values, kernel = sparse.projection.values.clone(), sparse.projections.selections[0]["qkv"].thresholds
    values[0, :3], kernel[:] = nth * (1 + close), nth * (1 - close)  # the kernel reads that channel, the reference not
    sparse.projection = dataclasses.replace(sparse.projection, values=values)
    if passes:
        assert reference.gate_step(sparse) < 1e-5
        assert int(sparse.projections.counters[0][0, 0]) > int((normed > values[0, 0]).sum())
    else:
        with pytest.raises(RuntimeError, match="qkv of layer 0 differs"):
            reference.gate_step(sparse)


def test_a_mode_that_skips_steps_is_an_error(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsynchronised or idle clock: the loop ran, the work did not."""
    real = timing.interleave

    def idle(decoders: Any, steps: int, warmup: int, order_seed: int) -> Any:
        found = real(decoders, 1, warmup)
        return {name: timing.Samples(one.ms * steps, list(range(steps))) for name, one in found.items()}

    monkeypatch.setattr(cells, "interleave", idle)
    with pytest.raises(RuntimeError, match="cache entries were expected"):
        measure(prepared, member(256, 1.0, 0.3))


def test_fault_25_moving_bytes_faster_than_memory_is_an_error() -> None:
    row = {"projection_bytes": 1e9, "kv_bytes": 0.0, "head_bytes": 0.0, "ms": [40.0, 10.0, 10.0], "mode": "kv"}
    row |= {"context": 1, "llc_bytes": 0}
    cells.check_bandwidth(row, Bandwidth(80.0, 90.0))
    with pytest.raises(RuntimeError, match=r"100.0 GB/s where memory reads 70.0"):
        cells.check_bandwidth(row, Bandwidth(60.0, 70.0))
    # A cache of 300 MB may have served 30% of the bytes: 70 GB/s came from memory.
    cells.check_bandwidth({**row, "llc_bytes": 300e6}, Bandwidth(60.0, 70.0))


def test_memory_is_measured_again_before_a_row_is_refused(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement fell on a moment when other work had the memory."""
    row = {"mode": "dense", "context": 256, "ms": [10.0] * 3, "llc_bytes": 0.0}
    row |= {"projection_bytes": 8e8, "kv_bytes": 1e8, "head_bytes": 1e8}
    calls: list[float] = []

    def measured(fastest: float) -> Any:
        return lambda device: (calls.append(fastest), Bandwidth(fastest, fastest))[1]

    monkeypatch.setattr(cells, "read_bandwidth", measured(95.0))
    assert cells.settled(row, Bandwidth(60.0, 60.0), torch.device("cpu")).fastest_gbps == 95.0 and len(calls) == 1
    monkeypatch.setattr(cells, "read_bandwidth", measured(50.0))
    with pytest.raises(RuntimeError, match="where memory reads 60"):
        cells.settled(row, Bandwidth(60.0, 60.0), torch.device("cpu"))


def test_interleaved_modes_take_turns_in_changing_order(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    decoders = {str(i): cells.build(prepared, member(256), 13) for i in range(3)}
    step = Decoder.step

    def note(self: Decoder) -> None:
        order.append(next(i for i, one in enumerate(decoders.values()) if one is self))
        step(self)

    monkeypatch.setattr(Decoder, "step", note)
    samples = timing.interleave(decoders, 12, warmup=1)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 13 and all(sorted(one) == [0, 1, 2] for one in rounds)
    # A rotated cycle would give each mode one predecessor in every round.
    assert {(a, b) for one in rounds for a, b in itertools.pairwise(one)} == set(itertools.permutations(range(3), 2))
    assert all(len(one.ms) == 12 and min(one.ms) > 0 for one in samples.values())
    taken = sorted((turn, int(name)) for name, one in samples.items() for turn in one.turns)
    assert [name for _, name in taken] == order[3:] and [turn for turn, _ in taken] == list(range(36))


def test_modes_do_not_see_each_others_appended_entries() -> None:
    """Fault 15: each member decodes on a fork of its own."""
    real = prepare_synthetic(SHAPE, "cpu", torch.float32, 300)
    real = dataclasses.replace(real, synthetic=False)
    before = real.cache.keys.clone()
    first, second = (cells.build(real, member(256), STEPS) for _ in range(2))
    for _ in range(3):
        first.step()
    assert torch.equal(real.cache.keys, before)
    assert second.cache.tokens == 256 and first.cache.tokens == 259
    second.step()
    assert np.isfinite(second.logits.numpy()).all()


def test_kv_members_of_a_group_share_only_what_they_never_read() -> None:
    real = dataclasses.replace(prepare_synthetic(SHAPE, "cpu", torch.float32, 300), synthetic=False)
    group = [member(256, 1.0, 0.5), member(256, 0.5, 0.5), member(192, 1.0, 0.5, "window")]
    common = cells.Common(real.cache.fork(256, 256 + 64))
    lent = [cells.build(real, one, STEPS, common) for one in group]
    alone = [cells.build(real, one, STEPS) for one in group]
    for _ in range(3):
        for one in (*lent, *alone):
            one.step()
    for a, b in zip(lent, alone, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert a.cache.keys.data_ptr() == common.unread.keys.data_ptr() != b.cache.keys.data_ptr()  # type: ignore[union-attr]
    assert len({one.packed.keys.data_ptr() for one in lent if one.packed is not None}) == 3


@pytest.mark.parametrize(("tokens", "expected"), [(1, 256), (256, 256), (383, 256), (385, 512), (7936, 7936)])
def test_grid_rounds_to_lengths_whose_queries_are_kept(tokens: int, expected: int) -> None:
    assert grid(tokens) == expected


def test_every_context_goes_on_with_the_same_passage(prepared: Prepared) -> None:
    short, long = (cells.build(prepared, member(n), STEPS) for n in (256, 512))
    assert torch.equal(short.tokens[256:], long.tokens[512:])
    assert torch.equal(short.tokens[:256], prepared.tokens[:256])
