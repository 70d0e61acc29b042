"""Dense products against float64 on odd shapes and hostile inputs."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError, gemv
from kernels.norm import Norm, reference
from tests.inputs import KINDS, NAN, dot_error, draw, filled, vector
from tests.tolerances import DOT

SHAPES = [(1, 1), (1, 64), (3, 17), (7, 1), (129, 96), (192, 100), (257, 1000)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "depth"), SHAPES)
def test_gemv_equals_float64(rows: int, depth: int, kind: str, biased: bool) -> None:
    x, w = vector(kind, depth), draw(rows, depth, seed=1)
    bias = draw(rows, seed=2) if biased else None
    y = filled(rows)
    gemv.bind(x, w, y, bias)()
    added = torch.zeros(rows, dtype=torch.float64) if bias is None else bias.double()
    expected = (w.double() * x.double()).sum(1) + added
    assert dot_error(y, expected, w.double().abs() @ x.double().abs() + added.abs()) < DOT
    wide = gemv.reference(x.double(), w.double(), None if bias is None else bias.double())
    assert torch.allclose(wide, expected, rtol=1e-9, atol=1e-9 * float(x.abs().max()))


def test_fault_02_second_call_on_a_used_output_is_identical() -> None:
    x, w, y, bias = draw(100), draw(37, 100, seed=1), filled(37), draw(37, seed=2)
    launch = gemv.bind(x, w, y, bias)
    launch()
    first = y.clone()
    launch()
    assert torch.equal(y, first) and bool(torch.isfinite(first).all())
    y.fill_(NAN)
    launch()
    assert torch.equal(y, first)


def test_a_launch_reads_the_tensors_it_was_bound_to_each_time() -> None:
    x, w, y = draw(32), draw(5, 32, seed=1), filled(5)
    launch = gemv.bind(x, w, y)
    launch()
    x.copy_(draw(32, seed=3))
    launch()
    assert torch.allclose(y, w @ x, atol=1e-5)


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_fault_08_nan_and_inf_reach_every_output(bad: float) -> None:
    x, w, y = draw(64), draw(9, 64, seed=1), filled(9).zero_()
    x[11] = bad
    gemv.bind(x, w, y)()
    assert not bool(torch.isfinite(y).any())


@pytest.mark.parametrize("shape", [(2, 1, 64), (1, 2, 64), (2, 64), (1, 64), ()])
def test_fault_01_a_batch_of_tokens_is_a_typed_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"one token, shape \(K,\)"):
        gemv.bind(draw(*shape) if shape else torch.tensor(1.0), draw(9, 64), filled(9))


@pytest.mark.parametrize(
    ("x", "w", "y", "bias", "words"),
    [
        (draw(63), draw(9, 64), filled(9), None, r"x has shape \(63,\), expected \(64,\)"),
        (draw(64), draw(9, 64), filled(8), None, r"y has shape \(8,\), expected \(9,\)"),
        (draw(64), draw(9, 64), filled(9), draw(8), r"bias has shape"),
        (draw(64), draw(64, 9).T, filled(9), None, "w of shape .* must be contiguous"),
        (draw(64).double(), draw(9, 64), filled(9), None, "x has dtype torch.float64"),
        (draw(64), draw(9, 64).half(), filled(9), None, "w has dtype torch.float16"),
    ],
)
def test_what_does_not_fit_is_named(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        gemv.bind(x, w, y, bias)


def test_bytes_moved_are_those_of_the_weights() -> None:
    assert gemv.bytes_moved(draw(9, 64)) == 9 * 64 * 4
    assert gemv.bytes_moved(draw(9, 64).half()) == 9 * 64 * 2


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "depth"), SHAPES)
def test_a_norm_on_reading_and_a_sum_on_writing(rows: int, depth: int, kind: str, biased: bool) -> None:
    x, w, y = vector(kind, depth), draw(rows, depth, seed=1), draw(rows, seed=5)
    bias, before, same = draw(rows, seed=2) if biased else None, y.double(), x.clone()
    weight = draw(depth, seed=3)
    gemv.bind(x, w, y, bias, Norm(weight, 1e-5), accumulate=True)()
    wide = x.double()
    wide = wide / torch.sqrt((wide * wide).mean() + 1e-5) * weight.double()
    added = before if bias is None else before + bias.double()
    size = w.double().abs() @ wide.abs() + before.abs() + (0 if bias is None else bias.double().abs())
    assert dot_error(y, w.double() @ wide + added, size) < DOT
    assert torch.equal(x, same), "the residual stream is not normed in place"
    assert torch.allclose(reference(x.double(), Norm(weight, 1e-5)), wide, rtol=1e-12)


def test_the_epsilon_decides_for_tiny_vectors() -> None:
    y, x = filled(1), torch.full((4,), 1e-4)
    gemv.bind(x, torch.eye(4)[:1], y, norm=Norm(torch.ones(4), 1e-6))()
    assert float(y) == pytest.approx(1e-4 / (1e-8 + 1e-6) ** 0.5, rel=1e-6)
    gemv.bind(torch.zeros(4), torch.eye(4)[:1], y, norm=Norm(torch.ones(4), 1e-6))()
    assert float(y) == 0.0


def test_each_accumulating_call_adds_once_more() -> None:
    x, w, y = draw(64), draw(9, 64, seed=1), torch.zeros(9)
    launch = gemv.bind(x, w, y, accumulate=True)
    launch()
    once = y.clone()
    launch()
    assert torch.allclose(y, 2 * once, rtol=1e-6)


def test_a_norm_that_does_not_fit_is_named() -> None:
    with pytest.raises(ShapeError, match="norm weight has shape"):
        gemv.bind(draw(64), draw(9, 64), filled(9), norm=Norm(draw(63), 1e-5))
