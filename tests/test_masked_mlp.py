"""The masked up projection, routed and with a low-rank update, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError, masked_mlp
from kernels.masked_mlp import LowRank
from kernels.norm import Norm, reference
from tests.inputs import KINDS, NAN, draw, filled, vector
from tests.tolerances import DOT

WIDTHS = [1, 2, 33, 130, 1100]
DEPTH = 90


def counts() -> torch.Tensor:
    return torch.full((1,), -1, dtype=torch.int32)


def middle(gate: torch.Tensor, share: float) -> float:
    """A threshold between two values of |silu(gate)| with about `share` of them at or below it."""
    sizes = torch.nn.functional.silu(gate.double()).abs().sort().values
    at = min(int(share * len(sizes)), len(sizes) - 2)
    return float((sizes[at] + sizes[at + 1]) / 2) if len(sizes) > 1 else 0.0


def close(
    act: torch.Tensor, gate: torch.Tensor, z: torch.Tensor, w: torch.Tensor, limit: float, low: LowRank | None = None
) -> bool:
    """Compare with float64; the bound follows the sizes of all products."""
    wide = None if low is None else LowRank(low.gate_b.double(), low.up_b.double(), low.down_a.double())
    expected = masked_mlp.reference(gate.double(), z.double(), w.double(), limit, wide)
    width, rank = w.shape[0], 0 if low is None else low.rank
    size_g, size_u = gate[:width].double().abs(), w.double().abs() @ z.double().abs()
    if wide is not None:
        size_g = size_g + wide.gate_b.abs() @ gate[width : width + rank].double().abs()
        size_u = size_u + wide.up_b.abs() @ gate[width + rank :].double().abs()
    # |silu(g)| is at most |g| and its slope at most 1.1; 1e-6 more for the exponential and the division.
    bound = DOT * 4 * size_g * size_u
    if wide is not None:
        bound = torch.cat((bound, DOT * wide.down_a.abs().T @ (expected[:width].abs() + 1e6 * bound)))
    return bool(((act.double() - expected).abs() <= bound + 1e-30).all())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.95])
@pytest.mark.parametrize("width", WIDTHS)
def test_masked_rows_equal_float64(width: int, share: float) -> None:
    gate, x, w = draw(width, seed=2), draw(DEPTH), draw(width, DEPTH, seed=1)
    limit, act, kept = middle(gate, share), filled(width), counts()
    launch = masked_mlp.bind(gate, x, w, act, torch.tensor([limit]), kept)
    launch()
    first = act.clone()
    assert close(act, gate, x, w, limit)
    assert kept.tolist() == [int((torch.nn.functional.silu(gate.double()).abs() > limit).sum())]
    act.fill_(NAN)
    launch()
    assert torch.equal(first, act)


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_applied_while_reading(kind: str) -> None:
    gate, x, w, norm = draw(40, seed=2), vector(kind, DEPTH), draw(40, DEPTH, seed=1), Norm(draw(DEPTH, seed=3), 1e-5)
    act, kept, same = filled(40), counts(), x.clone()
    masked_mlp.bind(gate, x, w, act, torch.tensor([0.1]), kept, norm)()
    assert torch.equal(x, same)
    assert close(act, gate, reference(x.double(), norm).float(), w, float(torch.tensor(0.1)))


def test_the_mask_is_on_the_activated_gate_not_on_the_gate() -> None:
    """silu(-3) is -0.14 and silu(0.3) is 0.17: the threshold between them drops the larger gate."""
    gate, x, w, act, kept = torch.tensor([-3.0, 0.3]), draw(4), draw(2, 4, seed=1), filled(2), counts()
    masked_mlp.bind(gate, x, w, act, torch.tensor([0.16]), kept)()
    assert kept.tolist() == [1] and float(act[0]) == 0.0 and float(act[1]) != 0.0


@pytest.mark.parametrize(("limit", "rows"), [(1e30, 0), (0.0, 31), (-1.0, 33)])
def test_fault_08_all_none_and_zero_thresholds(limit: float, rows: int) -> None:
    gate, x, w, act, kept = draw(33, seed=2), draw(16), draw(33, 16, seed=1), filled(33), counts()
    gate[:2] = 0.0
    masked_mlp.bind(gate, x, w, act, torch.tensor([limit]), kept)()
    assert int(kept[0]) == rows and close(act, gate, x, w, limit)


def test_fault_08_nan_passes_and_a_dropped_row_is_never_read() -> None:
    gate, x, w, act, kept = draw(33, seed=2), draw(16), draw(33, 16, seed=1), filled(33), counts()
    gate[7], w[7] = 1e-6, NAN
    launch = masked_mlp.bind(gate, x, w, act, torch.tensor([0.01]), kept)
    launch()
    assert bool(torch.isfinite(act).all())
    gate[9] = NAN
    launch()
    assert bool(torch.isnan(act[9])) and int(torch.isnan(act).sum()) == 1


def low_rank(width: int, rank: int) -> LowRank:
    return LowRank(draw(width, rank, seed=5), draw(width, rank, seed=6), draw(width, rank, seed=7))


@pytest.mark.parametrize("rank", [1, 3, 16])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_low_rank_update_equals_base_plus_adapter(width: int, rank: int) -> None:
    """W + B A written out in full gives the same activations and the same low-rank sum for the down projection."""
    x, norm, low = draw(DEPTH), Norm(draw(DEPTH, seed=3), 1e-5), low_rank(width, rank)
    z = reference(x.double(), norm)
    w_gate, w, a = draw(width, DEPTH, seed=8), draw(width, DEPTH, seed=1), draw(2 * rank, DEPTH, seed=9)
    gate = torch.cat((w_gate.double() @ z, a.double() @ z)).float()
    act, kept, limit = filled(width + rank), counts(), 0.5
    masked_mlp.bind(gate, x, w, act, torch.tensor([limit]), kept, norm, low=low)()
    assert close(act, gate, z.float(), w, limit, low)

    merged_gate = (w_gate.double() + low.gate_b.double() @ a[:rank].double()) @ z
    merged_up = (w.double() + low.up_b.double() @ a[rank:].double()) @ z
    s = torch.nn.functional.silu(merged_gate)
    expected = torch.where(s.abs() > limit, s * merged_up, 0.0)
    sure = (s.abs() - limit).abs() > 1e-4
    assert torch.allclose(
        act[:width].double()[sure], expected[sure], rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    )


def test_fault_01_what_does_not_fit_is_a_typed_error() -> None:
    gate, x, w, act, limit = draw(8), draw(4), draw(8, 4), filled(8), torch.zeros(1)
    with pytest.raises(ShapeError, match="one token"):
        masked_mlp.bind(gate, draw(1, 4), w, act, limit, counts())
    with pytest.raises(ShapeError, match="gate has shape"):
        masked_mlp.bind(gate, x, w, act, limit, counts(), low=low_rank(8, 2))
    with pytest.raises(ShapeError, match="up_b has shape"):
        wrong = LowRank(draw(8, 2), draw(2, 8), draw(8, 2))
        masked_mlp.bind(draw(12), x, w, filled(10), limit, counts(), low=wrong)
