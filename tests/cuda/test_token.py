"""Embedding, greedy choice and counters."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.cuda import token
from tests.cuda.test_projections import draw


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


def test_the_look_up_of_the_next_token(device: torch.device) -> None:
    table = torch.tensor([False, True, False, True], device=device)
    tokens = torch.tensor([2, 1, 3, 0], device=device)
    position = torch.tensor([0], dtype=torch.int32, device=device)
    flag = torch.full((1,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
    launch = token.bind_route(tokens, position, table, flag)
    seen = []
    for at in range(5):  # the last one lies past the end
        position.fill_(at)
        launch()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seen.append(int(flag))
    assert seen == [0, 1, 1, 0, 0]
