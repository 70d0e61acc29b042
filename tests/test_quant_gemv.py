"""Products on 8- and 4-bit weights against float64 products of the numbers that their codes stand for."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ShapeError, quant_gemv
from kernels.norm import Norm, reference
from kernels.quantised import BITS, GROUP, Quantised, dequantise, pack, quantise, unpack
from kernels.selection import mask
from tests.inputs import KINDS, NAN, dot_error, draw, filled, selection, vector
from tests.tolerances import DOT


def weight_of(rows: int, depth: int, bits: int, seed: int = 1) -> tuple[Quantised, torch.Tensor]:
    made = quantise(draw(rows, depth, seed=seed), bits)
    return made, dequantise(made, torch.float64)


def size_of(x: torch.Tensor, weight: Quantised, w: torch.Tensor) -> torch.Tensor:
    """The scale of a product's rounding: sum |w||x|, in 4 bits also that of the 8 that every code is too large."""
    size = w.abs() @ x.double().abs()
    if weight.bits == 4:
        size += 8 * weight.scales.double().T @ x.double().abs().view(-1, GROUP).sum(1)
    return size


@settings(max_examples=30)
@given(rows=st.integers(1, 3), columns=st.integers(1, 4), seed=st.integers(0, 99))
def test_unpacking_undoes_packing(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns * GROUP), generator=generator, dtype=torch.uint8)
    packed = pack(codes)
    assert packed.shape == (rows, columns * GROUP // 2)
    assert torch.equal(unpack(packed), codes)


@pytest.mark.parametrize(("bits", "step"), [(8, 1 / 127), (4, 1 / 7)])
def test_rounding_is_at_most_half_a_step_and_layouts_agree(bits: int, step: float) -> None:
    w = draw(128, 192) * torch.linspace(0.1, 50, 128)[:, None]
    made = quantise(w, bits)
    largest = w.abs().amax(1, keepdim=True) if bits == 8 else w.view(128, 3, 64).abs().amax(2).repeat_interleave(64, 1)
    assert bool(((dequantise(made) - w).abs() <= 0.501 * step * largest).all())
    if bits == 8:
        assert torch.equal(made.q, made.q_in.T)
    else:
        assert torch.equal(unpack(made.q), unpack(made.q_in).T)
    expected = 8 + 32 / 192 if bits == 8 else 4.5
    assert made.dense_bytes * 8 / w.numel() == pytest.approx(expected)


def test_a_zero_weight_stays_zero() -> None:
    for bits in BITS:
        assert bool((dequantise(quantise(torch.zeros(64, 64), bits)) == 0).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
def test_dense_equals_float64(bits: int, kind: str) -> None:
    for rows, depth in ((64, 64), (192, 128), (320, 576)) if bits == 4 else ((1, 7), (129, 96), (192, 576)):
        weight, w = weight_of(rows, depth, bits)
        x, bias, y = vector(kind, depth), draw(rows, seed=2), filled(rows)
        launch = quant_gemv.bind(x, weight, y, bias)
        launch()
        expected = quant_gemv.reference(x.double(), weight, bias.double())
        assert dot_error(y, expected, size_of(x, weight, w) + bias.double().abs()) < DOT
        first = y.clone()
        launch()
        assert torch.equal(first, y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("segments", [(0, 192), (0, 64, 128, 192), (0, 128, 192)])
def test_sparse_is_the_masked_product_per_segment(segments: tuple[int, ...], bits: int, kind: str) -> None:
    depth = 448
    weight, w = weight_of(192, depth, bits)
    x = vector(kind, depth)
    thresholds = [float(x.abs().quantile(q)) for q in (0.5, 0.2, 0.8)][: len(segments) - 1]
    select, y = selection(thresholds, segments), filled(192)
    launch = quant_gemv.bind_sparse(x, weight, y, select)
    launch()
    expected = quant_gemv.reference_sparse(x.double(), weight, select.thresholds.double(), segments)
    size = size_of(x, weight, w)
    assert dot_error(y, expected, size) < DOT
    assert select.kept.tolist() == [int(mask(x, t).sum()) for t in select.thresholds]
    widths = [b - a for a, b in itertools.pairwise(segments)]
    read = sum(k * width for k, width in zip(select.kept.tolist(), widths, strict=True)) * bits / 8
    assert quant_gemv.bytes_moved(weight, select) == read + 4 * weight.scales.numel()
    first = y.clone()
    y.fill_(NAN)
    launch()
    assert torch.equal(first, y)


@pytest.mark.parametrize("bits", BITS)
def test_norm_bias_and_residual(bits: int) -> None:
    weight, w = weight_of(128, 192, bits)
    x, bias, norm, before = draw(192), draw(128, seed=2), Norm(draw(192, seed=3), 1e-5), draw(128, seed=4)
    read = reference(x.double(), norm)
    size = before.double().abs() + 3 * size_of(read, weight, w)
    y = before.clone()
    quant_gemv.bind(x, weight, y, bias, norm, accumulate=True)()
    assert dot_error(y, before.double() + quant_gemv.reference(read, weight, bias.double()), size) < DOT
    y, select = before.clone(), selection([0.6], (0, 128))
    quant_gemv.bind_sparse(x, weight, y, select, bias, norm, accumulate=True)()
    limits = select.thresholds.double()
    expected = quant_gemv.reference_sparse(read, weight, limits, (0, 128), bias.double())
    assert dot_error(y, before.double() + expected, size) < DOT


@pytest.mark.parametrize("bits", BITS)
def test_fault_08_all_none_and_nan(bits: int) -> None:
    weight, _ = weight_of(64, 128, bits)
    x = draw(128)
    for threshold, count in ((1e9, 0), (0.0, 128), (-1.0, 128)):
        select, y = selection([threshold], (0, 64)), filled(64)
        quant_gemv.bind_sparse(x, weight, y, select)()
        assert select.kept.tolist() == [count] and bool((y == 0).all()) == (count == 0)
    x[70] = NAN
    select, y = selection([0.5], (0, 64)), torch.zeros(64)
    quant_gemv.bind_sparse(x, weight, y, select)()
    assert bool(y.isnan().all())


def test_bits_do_not_depend_on_threads() -> None:
    import numba

    before = numba.get_num_threads()
    for bits in BITS:
        weight, _ = weight_of(192, 640, bits)
        found = []
        for threads in (before, 1):
            numba.set_num_threads(threads)
            select, y = selection([0.6], (0, 192)), filled(192)
            quant_gemv.bind_sparse(draw(640), weight, y, select)()
            found.append(y)
        numba.set_num_threads(before)
        assert torch.equal(*found)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="8 or 4 bits"):
        quantise(draw(64, 64), 3)
    with pytest.raises(ShapeError, match="multiples of 64"):
        quantise(draw(64, 96), 4)
    weight, _ = weight_of(64, 128, 4)
    for x, y in ((draw(64), filled(64)), (draw(128), filled(32)), (draw(2, 64), filled(64))):
        with pytest.raises(ShapeError):
            quant_gemv.bind(x, weight, y)
    with pytest.raises(ShapeError, match="multiples of 64"):
        quant_gemv.bind_sparse(draw(128), weight, filled(64), selection([0.1, 0.2], (0, 32, 64)))
    with pytest.raises(ShapeError, match="segments end at 63"):
        quant_gemv.bind_sparse(draw(128), weight, filled(64), selection([0.1], (0, 63)))
