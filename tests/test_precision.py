"""Quantised decoding against the numeric gate and float64, a fixed budget's crossing, and the claim's seeded faults."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch

from artifact.account import Mode
from artifact.engine import models
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.prefill import logits, prefill
from artifact.engine.prepare import Prepared
from artifact.engine.reference import gate_step
from artifact.errors import UserError
from artifact.judge.levels import with_levels
from artifact.judge.precision import Variant, crossing
from artifact.measure import precision_cells
from artifact.measure.cells import EXTRA_STEPS
from artifact.measure.precision_cells import measure, timed
from artifact.projection import teal
from artifact.projection.quantised import Precision, to_precision
from artifact.shapes import Shape
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import precision as claim
from kernels.quantised import dequantise
from tests.faults.precision import PROFILE, Row, codes_are_expanded, honest, sparse_reads_all_codes
from tests.inputs import relative
from tests.tolerances import LOGITS

pytestmark = pytest.mark.usefixtures("one_thread")
# Widths that 4 bits can group: 128 = 2 x 64, 3 heads over 1 KV head, and a head of its own.
SHAPE = Shape("small", 128, 2, 3, 1, 64, 192, 97, 512, False)


@pytest.fixture(scope="module")
def weights() -> models.Weights:
    return models.synthetic(SHAPE, "cpu", torch.float32, 3)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(2, SHAPE.vocab, (count,), generator=torch.Generator().manual_seed(1))


def filled(precision: Precision, count: int = 40) -> KVCache:
    return prefill(precision.weights, tokens(count), count + 4).cache


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("keep", [None, 0.5])
def test_every_operation_of_a_step_passes_the_numeric_gate(
    weights: models.Weights, bits: int, keep: float | None
) -> None:
    precision = to_precision(weights, bits)
    thresholds = None if keep is None else teal.calibrate(weights, tokens(200)).thresholds(keep)
    decoder = Decoder(precision.weights, filled(precision), tokens(44), precision.branch(thresholds))
    assert gate_step(decoder) < 1e-4
    counted = decoder.counted()
    share = (counted.projection_bytes - precision.scale_bytes) / (precision.dense_bytes - precision.scale_bytes)
    assert share == (1.0 if keep is None else pytest.approx(keep, abs=0.1))
    assert precision.weight_bits == pytest.approx(bits + (0.5 if bits == 4 else 32 / 150), rel=0.05)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_dense_step_is_the_prefill_of_the_numbers_that_the_codes_stand_for(
    weights: models.Weights, bits: int
) -> None:
    precision = to_precision(weights, bits)
    for layer, codes in zip(precision.weights.layers, precision.codes, strict=True):
        assert torch.equal(layer.down.w, dequantise(codes["down"]))
    decoder = Decoder(precision.weights, filled(precision), tokens(44), precision.branch())
    decoder.step()
    whole = prefill(precision.weights, tokens(41))
    assert relative(decoder.logits, logits(precision.weights, whole.hidden[-1:])[0].double()) < 10 * LOGITS
    assert relative(decoder.logits, logits(weights, prefill(weights, tokens(41)).hidden[-1:])[0].double()) > 1e-3


def test_what_cannot_be_quantised_is_refused(weights: models.Weights) -> None:
    with pytest.raises(UserError, match="3 bits"):
        to_precision(weights, 3)
    odd = models.synthetic(dataclasses.replace(SHAPE, intermediate=200), "cpu", torch.float32)
    with pytest.raises(UserError, match="200 wide"):
        to_precision(odd, 4)
    precision = to_precision(odd, 8)
    with pytest.raises(UserError, match="do not decode"):
        Decoder(weights, filled(to_precision(weights, 8)), tokens(44), precision.branch())


def test_a_pass_over_given_tokens_computes_with_the_same_numbers(weights: models.Weights) -> None:
    precision = to_precision(weights, 4)
    rows = precision.branch().rows(precision.weights)
    x = torch.randn(3, SHAPE.hidden, generator=torch.Generator().manual_seed(0))
    expected = x @ dequantise(precision.codes[0]["qkv"]).T
    assert relative(rows.qkv(0, precision.weights.layers[0], x), expected.double()) < 1e-5
    assert rows.r_p == 1.0


@pytest.fixture(scope="module")
def prepared(weights: models.Weights) -> Prepared:
    made = prefill(weights, tokens(300), query_lengths=(256,), rows=16)
    calibration = teal.calibrate(weights, tokens(200))
    return Prepared(weights, tokens(400), calibration, made.cache, made.queries, "a text")


@pytest.mark.parametrize("variant", [Variant("int8", bits=8), Variant("int4", bits=4), Variant("budget", None, 64)])
def test_rows_count_what_they_say(prepared: Prepared, variant: Variant) -> None:
    precision = None if variant.bits is None else to_precision(prepared.weights, variant.bits)
    group = [(256, mode, "sweep") for mode in (Mode.DENSE, Mode.PROJECTION, Mode.KV)]
    dense, sparse, kept = with_levels(measure(prepared, precision, variant, group, (0.5, 0.3), 4))
    assert dense["counted_r_p"] == 1 and abs(sparse["counted_r_p"] - 0.5) < 0.05
    share = 0.25 if variant.budget_tokens else 0.3
    assert kept["counted_r_kv"] == pytest.approx(share, abs=0.02)
    bits = {"int8": 8.2, "int4": 4.5, "budget": 32}[variant.name]
    assert dense["weight_bits"] == pytest.approx(bits, abs=0.1) and dense["kv_bits"] == 32
    assert max(row["gate_error"] for row in (dense, sparse, kept)) < 1e-3


def test_a_pilot_chooses_the_contexts_of_the_blocks(weights: models.Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(params: Row, say: object) -> Prepared:
        longest = int(params["longest"])
        text = tokens(longest + int(params["steps"]) + EXTRA_STEPS + 1)
        filled = prefill(weights, text[:longest], query_lengths=range(256, longest + 1, 256), rows=16)
        calibration = teal.calibrate(weights, tokens(200))
        return Prepared(weights, text, calibration, filled.cache, filled.queries, "a text")

    monkeypatch.setattr(precision_cells, "prepared_for", made)
    int8, ends = Variant("int8", bits=8), (256, 512)
    variant = dataclasses.asdict(int8)
    params = {"r_p": 0.5, "r_kv": 0.3, "steps": 3, "longest": 512, "order_seed": 0, "variants": [[variant, ends, []]]}
    first = [row for row in precision_cells.pilot(params) if "kind" in row]
    assert {row["kind"] for row in first} == {"pilot"} and {row["part"] for row in first} == {"sweep"}
    contexts = precision_cells.crossing_contexts(first, int8, ends, (0.5, 0.3))
    assert len(set(contexts)) == 2 and all(n % 256 == 0 and 256 <= n <= 512 for n in contexts)
    rows = [row for row in timed(params | {"variants": [[variant, ends, contexts]]}) if row.get("kind") == "precision"]
    assert sorted({row["context"] for row in rows if row["part"] == "crossing"}) == sorted(contexts)
    assert all(len(row["ms"]) == 3 for row in rows) and len(rows) == 6 + 2 * len(contexts)


def test_honest_rows_give_the_accounts_crossings() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert summarise(findings) is Verdict.REPRODUCED
    expected = {"int8": 6583 * 8.05 / 32, "int4": 6583 * 4.5 / 32, "budget": 1024 + 0.7 * 6583}
    for name, finding in zip(claim.WHERE, findings[1:], strict=True):
        assert finding.extra["measured, tokens"] == pytest.approx(expected[name], rel=1e-3)
        assert finding.extra["predicted, tokens"] == pytest.approx(expected[name], rel=1e-3)


def test_a_kernel_cost_moves_prediction_and_crossing_of_a_budget_alike() -> None:
    """1 ms more for every projection step: both move by 1 ms over the cache bytes of a token."""
    rows = [row for row in honest() if row["group"] == "budget" and row["block"] == 0]
    for row in rows:
        row["ms"] = [ms + (row["mode"] == "projection") for ms in row["ms"]]
    found = crossing(with_levels(rows), Variant("budget", None, 1024), 0.5, 0.3)
    per_token_ms = 30 * 2 * 3 * 64 * 4 / 20e6
    assert found.predicted == pytest.approx(5632 - 1 / per_token_ms, rel=1e-3)
    assert found.measured == pytest.approx(found.predicted, rel=1e-3)


@pytest.mark.parametrize("fault", [codes_are_expanded, sparse_reads_all_codes])
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None]) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    assert summarise(claim.judge(rows, PROFILE)) in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)


def test_a_missing_variant_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rows of int4"):
        claim.judge([row for row in honest() if row["group"] != "int4" or row["block"] != 1], PROFILE)
