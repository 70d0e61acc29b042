"""Norm, embedding, greedy choice and counters."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels import rmsnorm as norm_op
from kernels.cuda import rmsnorm, token
from tests.cuda.test_projections import draw, error


@pytest.mark.parametrize("added", [False, True])
def test_norm_equals_float64_and_updates_the_residual(device: torch.device, added: bool) -> None:
    torch.manual_seed(1)
    residual, weight, out = draw(device, 576), draw(device, 576), torch.full((576,), float("nan"), device=device)
    delta = draw(device, 576) if added else None
    expected = norm_op.reference(residual.double(), weight.double(), 1e-5, None if delta is None else delta.double())
    rmsnorm.bind(residual, weight, 1e-5, out, delta)()
    assert error(residual, expected[0]) < 1e-6 and error(out, expected[1]) < 1e-6


def test_embedding_choice_and_counters(device: torch.device) -> None:
    torch.manual_seed(2)
    table, tokens = draw(device, 11, 1100, dtype=torch.float16), torch.tensor([3, 7, 0, 0], device=device)
    position, out = torch.tensor([1], dtype=torch.int32, device=device), torch.empty(1100, device=device)
    token.bind_embed(tokens, position, table, out)()
    assert torch.equal(out, table[7].float())

    logits = draw(device, 5000)
    logits[4321] = logits[2222] = 50.0
    token.bind_argmax(logits, tokens, position)()
    assert tokens.tolist() == [3, 7, 2222, 0]

    lengths = [
        torch.tensor([[4, 9]], dtype=torch.int32, device=device),
        torch.tensor([7], dtype=torch.int32, device=device),
    ]
    kept = torch.tensor([[5, 6]], dtype=torch.int32, device=device)
    entries, total = (torch.tensor([[100, 2**40]], dtype=torch.int64, device=device) for _ in range(2))
    launch = token.bind_advance(position, lengths, (lengths[0], entries), (kept, total))
    launch()
    launch()
    assert position.tolist() == [3] and lengths[0].tolist() == [[6, 11]] and lengths[1].tolist() == [9]
    assert total.tolist() == [[110, 2**40 + 12]]
    assert entries.tolist() == [[100 + 5 + 6, 2**40 + 10 + 11]]
