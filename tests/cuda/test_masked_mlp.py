"""The masked up projection against float64, on odd shapes, routed and with a low-rank update."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from kernels import Launch
from kernels import masked_mlp as op
from kernels.cuda import masked_mlp
from kernels.cuda.masked_mlp import Config
from kernels.masked_mlp import LowRank
from kernels.norm import Norm
from tests.cuda.test_projections import draw, error, normed

TOLERANCE = 2e-5  # float32 sums of at most 320 terms against float64; inputs are exact in half precision


def wide(low: LowRank | None) -> LowRank | None:
    return None if low is None else LowRank(low.gate_b.double(), low.up_b.double(), low.down_a.double())


def low_rank(device: torch.device, width: int, rank: int, dtype: torch.dtype) -> LowRank:
    return LowRank(*(draw(device, width, rank, dtype=dtype, scale=0.5) for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "depth"), [(7, 64), (129, 96), (33, 320)])
@pytest.mark.parametrize("chosen", [None, Config(4, 64, 1), Config(33, 512, 2, 2), Config(9, 64, 1, 4)])
@pytest.mark.parametrize("rank", [0, 3])
def test_masked_rows_equal_float64(
    device: torch.device, width: int, depth: int, dtype: torch.dtype, chosen: Config | None, rank: int
) -> None:
    torch.manual_seed(width + rank)
    low = low_rank(device, width, rank, dtype) if rank else None
    gate, x, w = draw(device, width + 2 * rank), draw(device, depth), draw(device, width, depth, dtype=dtype)
    norm, limit = Norm(draw(device, depth), 1e-5), torch.tensor([0.2], device=device)
    kept = torch.full((1,), -1, dtype=torch.int32, device=device)
    act = torch.full((width + rank,), float("nan"), device=device)
    launch = masked_mlp.bind(gate, x, w, act, limit, kept, norm, low, chosen)
    launch()
    expected = op.reference(gate.double(), normed(x, norm), w.double(), float(limit), wide(low))
    assert error(act, expected) < TOLERANCE
    assert kept.tolist() == [int((expected[:width] != 0).sum())]
    first = act.clone()
    act.fill_(float("nan"))
    launch()
    assert torch.equal(first, act)


def test_more_programs_than_are_gathered_at_a_time(device: torch.device) -> None:
    torch.manual_seed(5)
    width, rank = 2 * masked_mlp.GATHERED + 9, 5
    low = low_rank(device, width, rank, torch.float16)
    gate, x, w = draw(device, width + 2 * rank), draw(device, 32), draw(device, width, 32, dtype=torch.float16)
    kept = torch.full((1,), -1, dtype=torch.int32, device=device)
    act, limit = torch.full((width + rank,), float("nan"), device=device), torch.tensor([0.3], device=device)
    masked_mlp.bind(gate, x, w, act, limit, kept, None, low, Config(width, 32, 1))()
    expected = op.reference(gate.double(), x.double(), w.double(), float(limit), wide(low))
    assert error(act, expected) < TOLERANCE and int(kept[0]) == int((expected[:width] != 0).sum())


def nan_passes_and_a_dropped_row_is_never_read(
    bind: Callable[..., Launch], device: torch.device, width: int, depth: int
) -> None:
    """Of any form of this operation: a weight row that is NaN under a gate near 0, then a gate that is NaN."""
    torch.manual_seed(7)
    gate, x, w = draw(device, width), draw(device, depth), draw(device, width, depth, dtype=torch.float16)
    gate[7], w[7] = 1e-6, float("nan")
    kept, limit = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([0.01], device=device)
    act = torch.zeros(width, device=device)
    launch = bind(gate, x, w, act, limit, kept, None, None)
    launch()
    assert bool(torch.isfinite(act).all())
    gate[9] = float("nan")
    launch()
    assert bool(torch.isnan(act[9])) and int(torch.isnan(act).sum()) == 1


def test_nan_passes_and_a_dropped_row_is_never_read(device: torch.device) -> None:
    nan_passes_and_a_dropped_row_is_never_read(masked_mlp.bind, device, 24, 64)
