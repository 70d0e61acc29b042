"""Dense, thresholded and gated products against float64, on odd shapes and hostile inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels import gate_up as gate_up_op
from kernels import sparse_gemv as sparse_op
from kernels.cuda import gate_up, gemv, sparse_gemv
from kernels.norm import Norm
from kernels.selection import Selection

TOLERANCE = 2e-5  # float32 sums of at most 320 terms against float64; inputs are exact in half precision


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative Frobenius error; NaN when either holds one."""
    expected = expected.to(actual.device).double()
    return float((actual.double() - expected).norm() / expected.norm())


def draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(device)


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    x = x.double()
    return x if norm is None else x * torch.rsqrt(x.pow(2).mean() + norm.eps) * norm.weight.double()


def chosen_by(device: torch.device, thresholds: list[float], segments: tuple[int, ...]) -> Selection:
    kept = torch.full((len(thresholds),), -1, dtype=torch.int32, device=device)
    return Selection(torch.tensor(thresholds, device=device), segments, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "depth"), [(7, 64), (129, 96), (32, 320)])
@pytest.mark.parametrize("chosen", [None, gemv.Config(2, 64, 1), gemv.Config(2, 512, 1, resident=2)])
def test_dense_equals_float64_with_bias_norm_and_residual(
    device: torch.device, rows: int, depth: int, dtype: torch.dtype, chosen: gemv.Config | None
) -> None:
    torch.manual_seed(rows)
    x, w, bias = draw(device, depth), draw(device, rows, depth, dtype=dtype), draw(device, rows)
    y = torch.full((rows,), float("nan"), device=device)
    gemv.bind(x, w, y, bias, chosen=chosen)()
    assert error(y, w.double() @ x.double() + bias.double()) < TOLERANCE

    norm = Norm(draw(device, depth), 1e-5)
    before = draw(device, rows)
    y = before.clone()
    gemv.bind(x, w, y, norm=norm, accumulate=True, chosen=chosen)()
    assert error(y, before.double() + w.double() @ normed(x, norm)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gated_dense_equals_float64(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for inner, chosen in (
        (33, gemv.Config(1, 32, 1)),
        (48, gemv.Config(2, 32, 1)),
        (33, gemv.Config(2, 64, 1, resident=1)),
    ):
        x, w, norm = draw(device, 64), draw(device, 2 * inner, 64, dtype=dtype), Norm(draw(device, 64), 1e-6)
        act = torch.full((inner,), float("nan"), device=device)
        gate_up.bind(x, w, act, norm=norm, chosen=chosen)()
        assert error(act, gate_up_op.reference(normed(x, norm), w.double())) < TOLERANCE


@pytest.mark.parametrize("segments", [(0, 192), (0, 129), (0, 128, 160, 192), (0, 100, 101, 129)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("listed", [False, True])
def test_sparse_equals_the_masked_product_per_segment(
    device: torch.device, segments: tuple[int, ...], dtype: torch.dtype, listed: bool
) -> None:
    torch.manual_seed(2)
    depth, columns = 96, segments[-1]
    x, w = draw(device, depth), draw(device, depth, columns, dtype=dtype)
    select = chosen_by(device, [0.5, 0.9, 0.1][: len(segments) - 1], segments)
    y = torch.full((columns,), float("nan"), device=device)
    launch = sparse_gemv.bind(x, w, y, select, chosen=sparse_gemv.Config(32, 8, 1, listed=listed))
    launch()
    expected = sparse_op.reference(x.double(), w.double(), select.thresholds.double(), segments)
    assert error(y, expected) < TOLERANCE
    assert select.kept.tolist() == [int((x.abs() > t).sum()) for t in select.thresholds]
    first = y.clone()
    y.fill_(float("nan"))
    launch()
    assert torch.equal(first, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_applies_norm_bias_and_residual(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, w, bias = draw(device, 80, scale=3.0), draw(device, 80, 48, dtype=dtype), draw(device, 48)
    norm = Norm(draw(device, 80), 1e-5)
    select = chosen_by(device, [0.7], (0, 48))
    before = draw(device, 48)
    y = before.clone()
    sparse_gemv.bind(x, w, y, select, bias, norm, accumulate=True)()
    expected = sparse_op.reference(normed(x, norm), w.double(), select.thresholds.double(), (0, 48), bias.double())
    assert error(y, before.double() + expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gated_sparse_has_a_threshold_for_gate_and_one_for_up(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    for inner, listed in ((64, False), (43, False), (64, True), (43, True)):
        x, w, norm = draw(device, 96), draw(device, 96, 2 * inner, dtype=dtype), Norm(draw(device, 96), 1e-5)
        select = chosen_by(device, [0.4, 0.8], (0, inner, 2 * inner))
        act = torch.full((inner,), float("nan"), device=device)
        gate_up.bind_sparse(x, w, act, select, norm=norm, chosen=sparse_gemv.Config(32, 16, 1, listed=listed))()
        read = normed(x, norm)
        assert error(act, gate_up_op.reference_sparse(read, w.double(), select.thresholds.double())) < TOLERANCE
        assert select.kept.tolist() == [int((read.abs() > t).sum()) for t in (0.4, 0.8)]


@pytest.mark.parametrize(("threshold", "expected"), [(1e9, 0), (0.0, 64), (-1.0, 64)])
def test_sparse_extremes(device: torch.device, threshold: float, expected: int) -> None:
    torch.manual_seed(5)
    x, w = draw(device, 64), draw(device, 64, 32, dtype=torch.float16)
    select = chosen_by(device, [threshold], (0, 32))
    y = torch.full((32,), float("nan"), device=device)
    sparse_gemv.bind(x, w, y, select)()
    assert int(select.kept) == expected
    reference = w.double().T @ x.double() if expected else torch.zeros(32)
    assert torch.allclose(y.double(), reference.double().to(device), atol=1e-4)


def test_sparse_lets_nan_through_and_never_reads_a_skipped_row(device: torch.device) -> None:
    torch.manual_seed(6)
    x, w = draw(device, 64), draw(device, 64, 32, dtype=torch.float16)
    x[3] = 0.1
    w[3] = float("nan")
    select = chosen_by(device, [0.2], (0, 32))
    y = torch.zeros(32, device=device)
    launch = sparse_gemv.bind(x, w, y, select)
    launch()
    assert bool(torch.isfinite(y).all())
    x[5] = float("nan")
    launch()
    assert bool(torch.isnan(y).all())
