"""Residual addition and RMSNorm against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError, rmsnorm
from tests.inputs import NAN, draw, filled, relative, vector
from tests.tolerances import NORM


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("kind", ["normal", "wide", "outliers"])
@pytest.mark.parametrize("size", [1, 7, 129, 576])
@pytest.mark.parametrize("added", [False, True])
def test_norm_equals_float64_and_updates_the_residual(size: int, kind: str, eps: float, added: bool) -> None:
    residual, weight, out = vector(kind, size), draw(size, seed=1), filled(size)
    delta = draw(size, seed=2) if added else None
    wide = residual.double() + (0 if delta is None else delta.double())
    expected = wide / torch.sqrt((wide * wide).mean() + eps) * weight.double()
    again, normed = rmsnorm.reference(
        residual.double(), weight.double(), eps, None if delta is None else delta.double()
    )
    rmsnorm.bind(residual, weight, eps, out, delta)()
    assert relative(out, expected) < NORM and relative(residual, wide) < NORM
    assert torch.allclose(normed, expected, rtol=1e-12, atol=0) and torch.equal(again, wide)


def test_the_epsilon_decides_for_tiny_vectors() -> None:
    out = filled(4)
    rmsnorm.bind(torch.full((4,), 1e-4), torch.ones(4), 1e-6, out)()
    assert torch.allclose(out, torch.full((4,), 1e-4 / (1e-8 + 1e-6) ** 0.5), rtol=1e-6)
    rmsnorm.bind(torch.zeros(4), torch.ones(4), 1e-6, out)()
    assert torch.equal(out, torch.zeros(4))


def test_without_delta_the_residual_stays_and_a_second_call_agrees() -> None:
    residual, weight, out = draw(64), draw(64, seed=1), filled(64)
    before = residual.clone()
    launch = rmsnorm.bind(residual, weight, 1e-5, out)
    launch()
    first = out.clone()
    launch()
    assert torch.equal(residual, before) and torch.equal(out, first)


def test_fault_08_nan_reaches_every_output() -> None:
    residual, out = draw(64), filled(64).zero_()
    residual[3] = NAN
    rmsnorm.bind(residual, draw(64, seed=1), 1e-5, out)()
    assert bool(out.isnan().all())


@pytest.mark.parametrize("shape", [(1, 64), (2, 1, 64)])
def test_fault_01_a_batch_of_tokens_is_a_typed_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="residual has shape"):
        rmsnorm.bind(draw(*shape), draw(64), 1e-5, filled(64))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ShapeError, match="weight has shape"):
        rmsnorm.bind(draw(64), draw(63), 1e-5, filled(64))
    with pytest.raises(ShapeError, match="delta has shape"):
        rmsnorm.bind(draw(64), draw(64), 1e-5, filled(64), draw(1))
