"""Products of batches and of quantised weights in Triton against float64."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from kernels import ShapeError
from kernels import batched_gemv as batched_op
from kernels import batched_sparse_gemv as union_op
from kernels import quant_gemv as quant_op
from kernels import silu_product as silu_op
from kernels.cuda import batched_gemv, batched_sparse_gemv, quant_gemv, silu_product
from kernels.cuda.batched_gemv import Config
from kernels.norm import Norm, reference
from kernels.quantised import Quantised, quantise
from kernels.selection import Selection

TOLERANCE = 2e-5  # float32 sums of a few hundred terms; of a batch, inputs of 22 bits


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(device)


def chosen_by(device: torch.device, thresholds: list[float], segments: tuple[int, ...]) -> Selection:
    kept = torch.full((len(thresholds),), -1, dtype=torch.int32, device=device)
    return Selection(torch.tensor(thresholds, device=device), segments, kept)


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("normed", [False, True])
def test_a_dense_batch_equals_float64(device: torch.device, batch: int, normed: bool) -> None:
    torch.manual_seed(batch)
    x, w, bias = draw(device, batch, 200), draw(device, 75, 200, dtype=torch.float16), draw(device, 75)
    norm = Norm(draw(device, 200), 1e-5) if normed else None
    before = draw(device, batch, 75)
    y = before.clone()
    launch = batched_gemv.bind(x, w, y, bias, norm, normed)
    launch()
    expected = batched_op.reference(reference(x.double(), norm), w.double(), bias.double())
    assert error(y, expected + (before.double() if normed else 0.0)) < TOLERANCE


@pytest.mark.parametrize("segments", [(0, 75), (0, 32, 64, 75), (0, 33, 75)])
def test_a_sparse_batch_reads_the_union_and_uses_its_own(device: torch.device, segments: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    x, w = draw(device, 5, 200), draw(device, 200, 75, dtype=torch.float16)
    select = chosen_by(device, [0.6, 1.2, 0.2][: len(segments) - 1], segments)
    own = torch.full((5, len(segments) - 1), -1, dtype=torch.int32, device=device)
    y = torch.full((5, 75), float("nan"), device=device)
    launch = batched_sparse_gemv.bind(x, w, y, select, own, None, None, False)
    launch()
    expected = union_op.reference(x.double(), w.double(), select.thresholds.double(), segments)
    assert error(y, expected) < TOLERANCE
    assert select.kept.tolist() == union_op.union(x, select.thresholds)
    assert own.tolist() == [[int((one.abs() > t).sum()) for t in select.thresholds] for one in x]
    first = y.clone()
    y.fill_(float("nan"))
    launch()
    assert torch.equal(first, y)


@pytest.mark.parametrize("chosen", [Config(16, 64, 2, 3, 1), Config(32, 32, 4, 2, 3), Config(64, 16, 4, 4, 7)])
@pytest.mark.parametrize("masked", [False, True])
def test_shares_of_the_inputs_are_added(device: torch.device, chosen: Config, masked: bool) -> None:
    """Blocks past the end of the inputs, tiles past the end of a segment, and shares that hold nothing."""
    torch.manual_seed(6)
    batch, depth, segments = 3, 104, (0, 48, 80)
    x, bias, before = draw(device, batch, depth), draw(device, 80), draw(device, batch, 80)
    w = draw(device, *((depth, 80) if masked else (80, depth)), dtype=torch.float16)
    norm = Norm(draw(device, depth), 1e-5)
    select = chosen_by(device, [0.4, 0.9], segments) if masked else chosen_by(device, [0.0], (0, 80))
    own = torch.full((batch, 2), -1, dtype=torch.int32, device=device) if masked else None
    y = before.clone()
    launch = batched_gemv.bind_product(x, w, y, select, own, bias, norm, True, chosen)
    launch()
    read = reference(x.double(), norm)
    if masked:
        expected = union_op.reference(read, w.double(), select.thresholds.double(), segments, bias.double())
        assert select.kept.tolist() == union_op.union(read, select.thresholds)
    else:
        expected = batched_op.reference(read, w.double(), bias.double())
    assert error(y, expected + before.double()) < TOLERANCE
    first, y[:] = y.clone(), before
    launch()
    assert torch.equal(first, y)


@given(st.integers(1, 60_000), st.integers(1, 200_000), st.integers(1, 160))
def test_every_input_has_a_program_with_a_bit_for_it(depth: int, outputs: int, processors: int) -> None:
    c = batched_gemv.config(depth, outputs, processors)
    each = math.ceil(math.ceil(depth / c.depth) / c.splits)
    assert each * c.splits * c.depth >= depth and each <= batched_gemv.WORD


def test_channels_that_nobody_activates_are_not_read(device: torch.device) -> None:
    x, w = draw(device, 4, 256), draw(device, 256, 64, dtype=torch.float16)
    x[:, 7] = 1e-3
    w[7] = float("nan")
    select, y = chosen_by(device, [0.01], (0, 64)), torch.zeros(4, 64, device=device)
    own = torch.zeros(4, 1, dtype=torch.int32, device=device)
    batched_sparse_gemv.bind(x, w, y, select, own, None, None, False)()
    assert bool(torch.isfinite(y).all())


def test_float32_weights_are_refused(device: torch.device) -> None:
    with pytest.raises(ShapeError, match="float16 and bfloat16"):
        batched_gemv.bind(draw(device, 2, 16), draw(device, 8, 16), draw(device, 2, 8), None, None, False)


def test_inputs_keep_more_bits_than_a_half_has(device: torch.device) -> None:
    torch.manual_seed(3)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16 products
    x, w = draw(device, 2, 128), draw(device, 40, 128, dtype=dtype)
    y = torch.empty(2, 40, device=device)
    batched_gemv.bind(x, w, y, None, None, False)()
    rounded = batched_op.reference(x.to(dtype).double(), w.double())
    assert error(y, batched_op.reference(x.double(), w.double())) < 5e-5 < error(y, rounded)


def moved(weight: Quantised, device: torch.device) -> Quantised:
    return Quantised(weight.bits, weight.q.to(device), weight.q_in.to(device), weight.scales.to(device))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_quantised_dense_equals_float64(device: torch.device, bits: int, normed: bool) -> None:
    torch.manual_seed(bits)
    rows, depth = (128, 192) if bits == 4 else (77, 200)
    weight = quantise(torch.randn(rows, depth), bits)
    x, bias, before = draw(device, depth), draw(device, rows), draw(device, rows)
    norm = Norm(draw(device, depth), 1e-5) if normed else None
    y = before.clone()
    quant_gemv.bind(x, moved(weight, device), y, bias, norm, normed)()
    expected = quant_op.reference(reference(x.double().cpu(), norm_on_cpu(norm)), weight, bias.double().cpu())
    assert error(y.cpu(), expected + (before.double().cpu() if normed else 0.0)) < TOLERANCE


def norm_on_cpu(norm: Norm | None) -> Norm | None:
    return None if norm is None else Norm(norm.weight.cpu(), norm.eps)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("segments", [(0, 192), (0, 64, 128, 192)])
def test_quantised_sparse_is_the_masked_product(device: torch.device, bits: int, segments: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    weight = quantise(torch.randn(192, 320), bits)
    x = draw(device, 320)
    select = chosen_by(device, [0.6, 1.2, 0.2][: len(segments) - 1], segments)
    y = torch.full((192,), float("nan"), device=device)
    launch = quant_gemv.bind_sparse(x, moved(weight, device), y, select, None, None, False)
    launch()
    expected = quant_op.reference_sparse(x.double().cpu(), weight, select.thresholds.double().cpu(), segments)
    assert error(y.cpu(), expected) < TOLERANCE
    assert select.kept.tolist() == [int((x.abs() > t).sum()) for t in select.thresholds]
    first = y.clone()
    launch()
    assert torch.equal(first, y)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_extremes(device: torch.device, bits: int) -> None:
    weight, x = moved(quantise(torch.randn(64, 128), bits), device), draw(device, 128)
    for threshold, count in ((1e9, 0), (0.0, 128), (-1.0, 128)):
        select, y = chosen_by(device, [threshold], (0, 64)), torch.full((64,), float("nan"), device=device)
        quant_gemv.bind_sparse(x, weight, y, select, None, None, False)()
        assert select.kept.tolist() == [count] and bool((y == 0).all()) == (count == 0)
    x[70] = float("nan")
    select, y = chosen_by(device, [0.5], (0, 64)), torch.zeros(64, device=device)
    quant_gemv.bind_sparse(x, weight, y, select, None, None, False)()
    assert bool(y.isnan().all())


def test_silu_product(device: torch.device) -> None:
    both = draw(device, 3, 2 * 1100)
    act = torch.empty(3, 1100, device=device)
    silu_product.bind(both, act)()
    assert error(act, silu_op.reference(both.double())) < TOLERANCE
