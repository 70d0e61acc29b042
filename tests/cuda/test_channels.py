"""Attention over pruned channels and the choice of pages against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernels import channels as op
from kernels import pages as pages_op
from kernels.channels import Pruned
from kernels.cuda import channels, pages
from kernels.pages import Bounds
from kernels.ragged import Pages
from tests.cuda.test_attention import TOLERANCE
from tests.cuda.test_projections import draw, error
from tests.test_channels import VARIANTS, pruned, tail


def on(device: torch.device, packed: Pruned) -> Pruned:
    """The packed part on the device, floating point in half precision."""
    moved = {
        name: tensor.to(device, torch.float16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in packed.stored().items()
    }
    return replace(packed, **moved)


def check(device: torch.device, packed: Pruned, lengths: list[int], heads: int, config: channels.Config) -> None:
    here, keys_values = on(device, packed), tail(lengths, max(lengths) + 3, packed.dim)
    end = (keys_values[0].half().to(device), keys_values[1].half().to(device), keys_values[2].to(device))
    query, out = draw(device, heads, packed.dim), torch.full((heads * packed.dim,), float("nan"), device=device)
    launch = channels.bind(query, here, end, out, 0.125, config)
    launch()
    cpu = replace(here, **{name: tensor.cpu() for name, tensor in here.stored().items()})
    expected = op.reference(query.double().cpu(), cpu, (end[0].cpu(), end[1].cpu(), end[2].cpu()), 0.125)
    assert error(out, expected) < TOLERANCE
    before = out.clone()
    launch()
    assert torch.equal(out, before)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "tokens"), [(9, 3, 64, 70), (4, 2, 128, 16), (2, 1, 80, 1)])
def test_packed_vectors_are_expanded_in_registers(
    device: torch.device, options: dict[str, object], heads: int, kv_heads: int, dim: int, tokens: int
) -> None:
    torch.manual_seed(heads)
    packed = pruned(kv_heads, tokens, dim, dim // 5, **options)
    check(device, packed, [21, 0, 40][:kv_heads], heads, channels.Config(3, 16, 2, 1, 1))


def test_shared_channels_meet_a_shortened_query(device: torch.device) -> None:
    base = pruned(2, 50, 128, 40)
    shared = torch.stack([torch.randperm(128)[:40].sort().values for _ in range(2)]).int()
    check(device, replace(base, mask=None, channels=shared), [9, 0], 8, channels.Config(2, 16, 2, 1, 1))


def test_pages_are_those_of_the_highest_bounds(device: torch.device) -> None:
    """Three heads, one read whole; the new key starts a page in one and falls into a page in the others."""
    lengths, size, dim = [16, 45, 30], 8, 64
    offsets = torch.tensor([0, 20, 70], device=device)
    keys, query = draw(device, 110, dim, dtype=torch.float16), draw(device, 6, dim)
    lows, highs = (
        torch.empty(14, dim, dtype=torch.float16, device=device),
        torch.empty(14, dim, dtype=torch.float16, device=device),
    )
    page_offsets = torch.tensor([0, 3, 9], device=device)
    for h, length in enumerate(lengths):
        for number in range((length + size - 1) // size):
            start = int(offsets[h]) + number * size
            page = keys[start : int(offsets[h]) + min(length, (number + 1) * size)]
            lows[int(page_offsets[h]) + number], highs[int(page_offsets[h]) + number] = page.amin(0), page.amax(0)
    table = Pages(
        torch.zeros(3, 6, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device), size
    )
    attended = torch.zeros(3, dtype=torch.int32, device=device)
    live = torch.tensor(lengths, dtype=torch.int32, device=device)
    budgets = torch.tensor([2, 3, -1], dtype=torch.int32, device=device)
    pages.bind(query, keys, offsets, live, Bounds(lows, highs, page_offsets), budgets, table, attended)()
    assert table.counts.tolist() == [2, 3, -1]
    for h, budget in ((0, 2), (1, 3)):
        own = keys[int(offsets[h]) : int(offsets[h]) + lengths[h] + 1].float().cpu()
        expected = pages_op.reference(query[2 * h : 2 * h + 2].cpu(), own, budget, size)
        assert table.chosen[h, :budget].tolist() == expected
    read = [pages_op.read_entries(3, 2, 17, 8) + 3 - 1, pages_op.read_entries(6, 3, 46, 8) + 6 - 1, 30]
    assert attended.tolist() == read
