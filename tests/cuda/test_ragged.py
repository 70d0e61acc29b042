"""Ragged attention, whole and by pages, and the append to its rows, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels import ragged as op
from kernels import rope_append as rope_op
from kernels.cuda import ragged, rope_append
from kernels.ragged import Pages
from tests.cuda.test_attention import TOLERANCE
from tests.cuda.test_projections import draw, error


def storage(device: torch.device, lengths: list[int], dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Half-precision keys, values and offsets of heads of these lengths; the rows between them hold NaN."""
    offsets = torch.tensor([sum(lengths[:h]) + 4 * h + 2 for h in range(len(lengths))])
    rows = sum(lengths) + 4 * len(lengths) + 2
    keys, values = (torch.full((rows, dim), float("nan"), dtype=torch.float16, device=device) for _ in range(2))
    for start, length in zip(offsets.tolist(), lengths, strict=True):
        keys[start : start + length + 1] = draw(device, length + 1, dim, dtype=torch.float16)
        values[start : start + length + 1] = draw(device, length + 1, dim, dtype=torch.float16)
    return keys, values, offsets.to(device)


def check(device: torch.device, lengths: list[int], heads: int, dim: int, config: ragged.Config,
          pages: Pages | None = None) -> None:  # fmt: skip
    keys, values, offsets = storage(device, lengths, dim)
    query, out = draw(device, heads, dim), torch.full((heads * dim,), float("nan"), device=device)
    live = torch.tensor(lengths, dtype=torch.int32, device=device)
    launch = ragged.bind(query, keys, values, offsets, live, out, dim**-0.5, 0, pages, config)
    launch()
    wide = (query.double().cpu(), keys.double().cpu(), values.double().cpu(), offsets.cpu(), live.cpu(), dim**-0.5)
    assert error(out, op.reference(*wide, pages)) < TOLERANCE
    before = out.clone()
    launch()
    assert torch.equal(out, before)


@pytest.mark.parametrize("programs", [1, 3, 16])
@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [([0, 37, 95], 9, 64), ([95, 0, 0, 5], 4, 128), ([64], 6, 80), ([3, 100, 16, 15, 31], 20, 64)],
)
def test_heads_of_any_length_for_any_number_of_programs(
    device: torch.device, lengths: list[int], heads: int, dim: int, programs: int
) -> None:
    torch.manual_seed(heads)
    check(device, lengths, heads, dim, ragged.Config(programs, 16, 2, 1, 1))


def test_pages_and_whole_heads_in_one_call(device: torch.device) -> None:
    chosen = torch.tensor([[0, 2, 5], [0, 0, 0], [1, 3, 0]], dtype=torch.int32, device=device)
    counts = torch.tensor([3, -1, 2], dtype=torch.int32, device=device)
    check(device, [85, 40, 63], 6, 64, ragged.Config(4, 16, 2, 1, 1), Pages(chosen, counts, 16))
    check(device, [85, 40, 63], 6, 64, ragged.Config(4, 32, 2, 1, 1), Pages(chosen, counts, 16))


@pytest.mark.parametrize("stored", [True, False])
def test_the_new_entry_goes_to_its_row_and_to_a_full_cache_that_is_stored(device: torch.device, stored: bool) -> None:
    dim, lengths = 64, [4, 9]
    keys, values, offsets = storage(device, lengths, dim)
    full = [torch.zeros(2, 80 if stored else 0, dim, dtype=torch.float16, device=device) for _ in range(2)]
    qkv, inv_freq = draw(device, 8 * dim), draw(device, dim // 2).abs()
    query = torch.full((4, dim), float("nan"), device=device)
    at = torch.tensor([70], dtype=torch.int32, device=device)
    live = torch.tensor(lengths, dtype=torch.int32, device=device)
    rows = (keys, values, offsets, live)
    rope_append.bind_rows(qkv, inv_freq, at, query, (full[0], full[1]), rows, None, None, 1e-6)()
    turned = rope_op.rotate(qkv.view(8, dim).double().cpu(), 70 * inv_freq.double().cpu())
    assert error(query.view(-1), turned[:4].reshape(-1)) < 1e-4
    for h, row in enumerate((offsets + live).tolist()):
        assert error(keys[row], turned[4 + h]) < TOLERANCE
        assert torch.equal(values[row], qkv.view(8, dim)[6 + h].half())
        assert not stored or torch.equal(full[0][h, 70], keys[row])
