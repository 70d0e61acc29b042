"""Gate, up and SiLU in one launch, dense and thresholded, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError, gate_up
from kernels.norm import Norm, reference
from tests.inputs import KINDS, NAN, draw, filled, selection, vector
from tests.tolerances import DOT

WIDTHS = [1, 2, 33, 80, 129]


def close(act: torch.Tensor, x: torch.Tensor, w: torch.Tensor, skip: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Compare with silu(g) u in float64; the bound follows the errors of g and u through the product."""
    width = act.shape[0]
    read = [torch.where(s, torch.zeros_like(x), x).double() for s in skip]
    gate, up = w[:width].double() @ read[0], w[width:].double() @ read[1]
    size_gate, size_up = w[:width].double().abs() @ read[0].abs(), w[width:].double().abs() @ read[1].abs()
    sigmoid = torch.sigmoid(gate)
    expected = gate * sigmoid * up
    # d silu / d g is at most 1.1 in size; 1e-6 more for the exponential and the division.
    bound = DOT * (1.1 * size_gate * (up.abs() + DOT * size_up) + (gate * sigmoid).abs() * size_up + expected.abs())
    return bool(((act.double() - expected).abs() <= bound + 1e-30).all())


def nothing(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    none = torch.zeros_like(x, dtype=torch.bool)
    return none, none


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_dense_equals_float64(width: int, kind: str) -> None:
    x, w, act = vector(kind, 90), draw(2 * width, 90, seed=1), filled(width)
    launch = gate_up.bind(x, w, act)
    launch()
    first = act.clone()
    assert close(act, x, w, nothing(x))
    launch()
    assert torch.equal(act, first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("levels", [(0.5, 0.5), (0.3, 0.8), (0.8, 0.3)])
def test_thresholded_equals_float64_with_two_thresholds(width: int, kind: str, levels: tuple[float, float]) -> None:
    x, w, act = vector(kind, 90), draw(2 * width, 90, seed=1), filled(width)
    thresholds = [float(x.abs().quantile(q)) for q in levels]
    select = selection(thresholds, (0, width, 2 * width))
    launch = gate_up.bind_sparse(x, w.T.contiguous(), act, select)
    launch()
    first = act.clone()
    skip = (x.abs() <= thresholds[0], x.abs() <= thresholds[1])
    assert close(act, x, w, skip)
    assert select.kept.tolist() == [int((~s).sum()) for s in skip]
    launch()
    assert torch.equal(act, first)


def test_references_agree_with_each_other_and_with_float64() -> None:
    x, w = draw(40), draw(26, 40, seed=1)
    dense = gate_up.reference(x.double(), w.double())
    gate, up = (w.double() @ x.double()).chunk(2)
    assert torch.allclose(dense, gate / (1 + torch.exp(-gate)) * up, rtol=1e-12)
    kept_all = gate_up.reference_sparse(x.double(), w.double().T, torch.tensor([-1.0, -1.0]))
    assert torch.allclose(kept_all, dense, rtol=1e-10)


@pytest.mark.parametrize(("threshold", "kept"), [(1e30, 0), (0.0, 60), (-1.0, 64)])
def test_fault_08_all_none_and_zero_thresholds(threshold: float, kept: int) -> None:
    x, w, act = draw(64), draw(66, 64, seed=1), filled(33)
    x[:4] = 0.0
    select = selection([threshold, threshold], (0, 33, 66))
    gate_up.bind_sparse(x, w.T.contiguous(), act, select)()
    assert select.kept.tolist() == [kept, kept]
    assert torch.equal(act, torch.zeros(33)) if kept == 0 else close(act, x, w, nothing(x))


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("sparse", [False, True])
def test_fault_08_nan_and_inf_are_not_dropped(bad: float, sparse: bool) -> None:
    x, w, act = draw(64), draw(66, 64, seed=1), filled(33).zero_()
    x[5] = bad
    if sparse:
        gate_up.bind_sparse(x, w.T.contiguous(), act, selection([1e30, 1e30], (0, 33, 66)))()
    else:
        gate_up.bind(x, w, act)()
    assert not bool(torch.isfinite(act).any())


@pytest.mark.parametrize("gate", [-1000.0, -100.0, -87.5, -20.0, 0.0, 20.0, 88.5, 1000.0])
def test_silu_saturates_without_overflow(gate: float) -> None:
    act = filled(1)
    gate_up.bind(torch.tensor([1.0]), torch.tensor([[gate], [3.0]]), act)()
    expected = 3.0 * torch.nn.functional.silu(torch.tensor(gate, dtype=torch.float64))
    assert float(act) == pytest.approx(float(expected), rel=1e-6, abs=1e-33)


@pytest.mark.parametrize("shape", [(2, 1, 64), (1, 2, 64), (1, 64)])
def test_fault_01_a_batch_of_tokens_is_a_typed_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="one token"):
        gate_up.bind(draw(*shape), draw(66, 64), filled(33))
    with pytest.raises(ShapeError, match="one token"):
        gate_up.bind_sparse(draw(*shape), draw(64, 66), filled(33), selection([0.1, 0.1], (0, 33, 66)))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ShapeError, match="65 outputs, an odd number"):
        gate_up.bind(draw(64), draw(65, 64), filled(32))
    with pytest.raises(ShapeError, match=r"must be \(0, 33, 66\)"):
        gate_up.bind_sparse(draw(64), draw(64, 66), filled(33), selection([0.1, 0.1], (0, 30, 66)))
    with pytest.raises(ShapeError, match="act has shape"):
        gate_up.bind(draw(64), draw(66, 64), filled(32))


@pytest.mark.parametrize("depth", [1, 3, 1100, 9000])
def test_channels_divided_into_parts_are_all_counted_once(depth: int) -> None:
    x, w, act = vector("outliers", depth), draw(66, depth, seed=1), filled(33)
    select = selection([0.4, 1.0], (0, 33, 66))
    launch = gate_up.bind_sparse(x, w.T.contiguous(), act, select)
    for _ in range(2):
        launch()
        skip = (x.abs() <= 0.4, x.abs() <= 1.0)
        assert close(act, x, w, skip) and select.kept.tolist() == [int((~s).sum()) for s in skip]
        x[::2] = 0.0  # fewer channels than before: what the first call listed must not be read again


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_is_applied_while_reading(width: int, sparse: bool) -> None:
    x, w, act, weight = vector("outliers", 90), draw(2 * width, 90, seed=1), filled(width), draw(90, seed=3)
    norm, same = Norm(weight, 1e-5), x.clone()
    normed = reference(x.double(), norm).float()
    sizes = normed.abs().sort().values
    level = float((sizes[40] + sizes[41]) / 2)
    if sparse:
        select = selection([level, level], (0, width, 2 * width))
        gate_up.bind_sparse(x, w.T.contiguous(), act, select, norm)()
        assert select.kept.tolist() == [49, 49]
    else:
        gate_up.bind(x, w, act, norm)()
    skip = normed.abs() <= level if sparse else torch.zeros(90, dtype=torch.bool)
    assert torch.equal(x, same)
    assert close(act, normed, w, (skip, skip))
