"""Decode steps under a gate mask, routed and adapted, against transformers in float64, and what they say they read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from artifact.account import Scope, Setting, projection_bytes, projection_saving
from artifact.engine import teacher
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prefill import prefill
from artifact.engine.reference import gate_step
from artifact.errors import UserError
from artifact.projection.lora import AdaptedMask, AdaptedSteps, random_adapter
from artifact.projection.masked import GateMask, MaskedSteps
from kernels import masked_mlp, sparse_gemv
from tests.inputs import relative
from tests.masked_model import Masked, logits
from tests.models_fixture import VOCAB, Loaded, token_ids
from tests.tolerances import LOGITS

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, STEPS, RANK = 40, 12, 3
LIMITS = torch.tensor([0.25, 0.1, 0.4])


def half_of_the_vocabulary() -> torch.Tensor:
    return torch.arange(VOCAB) % 2 == 0


def decoder_of(weights: Weights, ids: torch.Tensor, branch: GateMask | AdaptedMask) -> Decoder:
    return Decoder(weights, prefill(weights, ids[:PROMPT], ids.shape[0]).cache, ids, branch)


def decoded(decoder: Decoder) -> torch.Tensor:
    rows = []
    for _ in range(STEPS):
        decoder.step()
        rows.append(decoder.logits.clone())
    return torch.stack(rows)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen3"])
def test_steps_and_one_pass_equal_transformers_with_the_mask(
    tiny: Tiny, name: str, routed: bool, adapted: bool
) -> None:
    loaded, ids = tiny(name), token_ids(PROMPT + STEPS)
    weights, shape = loaded.weights, loaded.weights.shape
    table = half_of_the_vocabulary() if routed else None
    adapter = random_adapter(shape, RANK, size=0.5) if adapted else None
    mask = GateMask(LIMITS, table)
    branch = mask if adapter is None else AdaptedMask(mask, adapter)
    expected, kept = logits(loaded.model, ids, Masked(PROMPT, LIMITS, table, adapter))

    decoder = decoder_of(weights, ids, branch)
    got = decoded(decoder)
    assert relative(got, expected[PROMPT:]) < LOGITS
    steps = decoder.projections
    assert isinstance(steps, MaskedSteps)
    low = RANK * steps.counters[1][:, 1] if adapted else torch.zeros(shape.layers, dtype=torch.int64)
    assert steps.counters[1][:, 0].tolist() == kept.sum(1).tolist()
    assert steps.counters[1][:, 2].tolist() == (kept.sum(1) + low).tolist()
    share = float(table[ids[PROMPT:]].float().mean()) if table is not None else 1.0
    assert steps.masked_share(STEPS) == pytest.approx(share)

    block = teacher.forward(weights, prefill(weights, ids[:PROMPT]).cache, ids[PROMPT:], branch)
    assert relative(block.hidden, hidden_of(weights, got, ids, branch)) < LOGITS


def hidden_of(weights: Weights, got: torch.Tensor, ids: torch.Tensor, branch: GateMask | AdaptedMask) -> torch.Tensor:
    """Residual streams of decode steps, for comparison with the pass's hidden states."""
    decoder, rows = decoder_of(weights, ids, branch), []
    for _ in range(STEPS):
        decoder.step()
        rows.append(decoder.buffers.residual.clone())
    return torch.stack(rows)


def test_counted_bytes_are_those_of_the_rows(tiny: Tiny) -> None:
    """Attention and gate densely, up and down by kept rows: the account's feed-forward bound with a dense gate."""
    loaded, ids = tiny("llama"), token_ids(PROMPT + STEPS)
    shape = loaded.weights.shape
    decoder = decoder_of(loaded.weights, ids, GateMask(LIMITS))
    decoded(decoder)
    _, kept = logits(loaded.model, ids, Masked(PROMPT, LIMITS))
    attention = shape.projection_params - shape.ffn_params
    rows = float(kept.sum()) / STEPS
    expected = 4 * (shape.layers * (attention + shape.hidden * shape.intermediate) + 2 * rows * shape.hidden)
    assert decoder.counted().projection_bytes == pytest.approx(expected)
    share = rows / (shape.layers * shape.intermediate)
    setting = Setting(r_p=share, weight_bits=32, scope=Scope.FFN_GATED)
    account = projection_bytes(shape, setting) - projection_saving(shape, setting)
    assert decoder.counted().projection_bytes == pytest.approx(account)
    everything = decoder_of(loaded.weights, ids, GateMask(torch.full((3,), -1.0)))
    decoded(everything)
    assert everything.counted().r_p == pytest.approx(1.0)
    block = teacher.forward(loaded.weights, prefill(loaded.weights, ids[:PROMPT]).cache, ids[PROMPT:], GateMask(LIMITS))
    assert block.r_p == pytest.approx(decoder.counted().r_p, rel=1e-6)


def test_an_adapter_costs_its_factors(tiny: Tiny) -> None:
    loaded, ids = tiny("llama"), token_ids(PROMPT + STEPS)
    shape, adapter = loaded.weights.shape, random_adapter(loaded.weights.shape, RANK, size=0.0)
    mask = GateMask(torch.full((3,), -1.0))
    plain, adapted = (decoder_of(loaded.weights, ids, one) for one in (mask, AdaptedMask(mask, adapter)))
    assert relative(decoded(adapted), decoded(plain)) < LOGITS
    # B of down is multiplied by sums that are not zero even when B is: its rows are read.
    factors = 3 * RANK * (shape.hidden + shape.intermediate) * shape.layers * 4
    extra = adapted.counted().projection_bytes - plain.counted().projection_bytes
    assert extra == pytest.approx(factors)


def test_fused_and_separate_products_agree_and_both_pass_the_gate(tiny: Tiny) -> None:
    loaded, ids = tiny("llama"), token_ids(PROMPT + STEPS)
    adapter = random_adapter(loaded.weights.shape, RANK, size=0.5)
    fused, apart = (
        decoder_of(loaded.weights, ids, AdaptedMask(GateMask(LIMITS), adapter, fused=one)) for one in (True, False)
    )
    assert len(apart.ops) == len(fused.ops) + 6 * loaded.weights.shape.layers
    for _ in range(STEPS):
        assert gate_step(fused) < 1e-5 and gate_step(apart) < 1e-5
        assert relative(fused.logits, apart.logits) < LOGITS
    fused_bytes, apart_bytes = (one.counted().projection_bytes for one in (fused, apart))
    assert fused_bytes < apart_bytes  # B of up and A of down are read by kept rows only


def test_routed_steps_pass_the_gate_on_both_paths(tiny: Tiny) -> None:
    loaded, ids = tiny("qwen3"), token_ids(PROMPT + STEPS)
    adapter = random_adapter(loaded.weights.shape, RANK, size=0.5)
    table = half_of_the_vocabulary()
    assert set(table[ids[PROMPT:]].tolist()) == {True, False}
    for branch in (GateMask(LIMITS, table), AdaptedMask(GateMask(LIMITS, table), adapter)):
        decoder = decoder_of(loaded.weights, ids, branch)
        for _ in range(STEPS):
            assert gate_step(decoder) < 1e-5


def test_a_base_token_is_the_dense_model(tiny: Tiny) -> None:
    loaded, ids = tiny("llama"), token_ids(PROMPT + STEPS)
    nobody = torch.zeros(VOCAB, dtype=torch.bool)
    adapter = random_adapter(loaded.weights.shape, RANK, size=0.5)
    decoder = decoder_of(loaded.weights, ids, AdaptedMask(GateMask(LIMITS, nobody), adapter))
    dense = Decoder(loaded.weights, prefill(loaded.weights, ids[:PROMPT], ids.shape[0]).cache, ids)
    assert relative(decoded(decoder), decoded(dense)) < LOGITS
    assert decoder.projections.masked_share(STEPS) == 0.0  # type: ignore[attr-defined]


def wrong_up_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = masked_mlp.bind
    monkeypatch.setattr(masked_mlp, "bind", lambda g, x, w, *rest: bind(g, x, w.roll(1, 0).contiguous(), *rest))


def wrong_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = masked_mlp.bind
    monkeypatch.setattr(masked_mlp, "bind", lambda g, x, w, act, t, *rest: bind(g, x, w, act, t * 1.5, *rest))


def update_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    down = AdaptedSteps.down_rows
    monkeypatch.setattr(
        AdaptedSteps, "down_rows", lambda self, *at: torch.cat((down(self, *at)[:-RANK], torch.zeros(RANK, 96)))
    )


def wrong_down_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = sparse_gemv.bind
    monkeypatch.setattr(sparse_gemv, "bind", lambda x, w, *rest: bind(x, w.roll(1, 0).contiguous(), *rest))


@pytest.mark.parametrize("fault", [wrong_up_rows, wrong_limit, update_left_out, wrong_down_rows])
def test_a_fault_fails_the_gate(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    loaded, ids = tiny("llama"), token_ids(PROMPT + STEPS)
    fault(monkeypatch)
    adapter = random_adapter(loaded.weights.shape, RANK, size=0.5)
    decoder = decoder_of(loaded.weights, ids, AdaptedMask(GateMask(LIMITS), adapter))
    with pytest.raises(RuntimeError, match="differs from its reference"):
        gate_step(decoder)


def test_what_does_not_fit_the_model_is_one_sentence(tiny: Tiny) -> None:
    weights, ids = tiny("llama").weights, token_ids(PROMPT + STEPS)
    with pytest.raises(UserError, match="gate limits for 5 layers, the model has 3"):
        decoder_of(weights, ids, GateMask(torch.zeros(5)))
    with pytest.raises(UserError, match="not one number per layer"):
        GateMask(torch.tensor([0.1, float("nan")]))
    with pytest.raises(UserError, match="vocabulary of 311"):
        decoder_of(weights, ids, GateMask(LIMITS, torch.zeros(7, dtype=torch.bool)))
    with pytest.raises(UserError, match="fused form"):
        mask = GateMask(LIMITS, half_of_the_vocabulary())
        decoder_of(weights, ids, AdaptedMask(mask, random_adapter(weights.shape, 2), fused=False))
    with pytest.raises(UserError, match="adapter has 3 layers, the model 2"):
        from dataclasses import replace

        random_adapter(weights.shape, 2).require_fit(replace(weights.shape, layers=2))
