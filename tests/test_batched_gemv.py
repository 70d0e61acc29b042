"""Products of a batch against float64 and against its sequences taken one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ShapeError, batched_gemv, batched_sparse_gemv, silu_product, sparse_gemv
from kernels.norm import Norm, reference
from kernels.selection import mask
from tests.inputs import KINDS, NAN, dot_error, draw, filled, selection, vector
from tests.tolerances import DOT, EXP

BATCHES = (1, 2, 3, 4, 5, 8, 16)


def batch_of(kind: str, batch: int, depth: int) -> torch.Tensor:
    return torch.stack([vector(kind, depth, seed=b) for b in range(batch)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_dense_equals_float64(batch: int, kind: str) -> None:
    for rows, depth in ((129, 96), (1, 7), (192, 101), (3, 576)):
        x, w, bias = batch_of(kind, batch, depth), draw(rows, depth, seed=1), draw(rows, seed=2)
        y = torch.full((batch, rows), NAN)
        launch = batched_gemv.bind(x, w, y, bias)
        launch()
        size = x.double().abs() @ w.double().abs().T + bias.double().abs()
        assert dot_error(y, batched_gemv.reference(x.double(), w.double(), bias.double()), size) < DOT
        first = y.clone()
        launch()
        assert torch.equal(first, y)


def test_dense_norms_every_row_and_adds_to_the_residual() -> None:
    x, w, norm = draw(5, 96), draw(40, 96, seed=1), Norm(draw(96, seed=3), 1e-5)
    before = draw(5, 40, seed=4)
    y = before.clone()
    batched_gemv.bind(x, w, y, norm=norm, accumulate=True)()
    read = reference(x.double(), norm)
    size = before.double().abs() + read.abs() @ w.double().abs().T
    assert dot_error(y, before.double() + read @ w.double().T, size) < 3 * DOT


@settings(max_examples=40)
@given(
    batch=st.integers(1, 16),
    depth=st.integers(1, 70),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    levels=st.lists(st.sampled_from([-1.0, 0.0, 0.3, 0.3, 1.0, 5.0]), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_sparse_is_every_sequence_by_itself_and_reads_the_union(
    batch: int, depth: int, widths: list[int], levels: list[float], seed: int
) -> None:
    segments = (0, *torch.tensor(widths).cumsum(0).tolist())
    x, w_in = draw(batch, depth, seed=seed), draw(depth, segments[-1], seed=seed + 1)
    select, own = selection(levels[: len(widths)], segments), torch.full((batch, len(widths)), -1, dtype=torch.int32)
    y = torch.full((batch, segments[-1]), NAN)
    batched_sparse_gemv.bind(x, w_in, y, select, own)()
    thresholds = select.thresholds.double()
    expected = batched_sparse_gemv.reference(x.double(), w_in.double(), thresholds, segments)
    assert dot_error(y, expected, x.double().abs() @ w_in.double().abs()) < DOT
    assert select.kept.tolist() == batched_sparse_gemv.union(x, select.thresholds)
    assert own.tolist() == [[int(mask(one, t).sum()) for t in select.thresholds] for one in x]


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    x, w_in = draw(6, 300), draw(300, 130, seed=1)
    select, own = selection([0.7], (0, 130)), torch.zeros(6, 1, dtype=torch.int32)
    y = torch.zeros(6, 130)
    batched_sparse_gemv.bind(x, w_in, y, select, own)()
    others = x.clone()
    others[1:] = draw(5, 300, seed=9) * 40
    z = torch.zeros(6, 130)
    batched_sparse_gemv.bind(others, w_in, z, select, own)()
    single, alone = filled(130), selection([0.7], (0, 130))
    sparse_gemv.bind(x[0].contiguous(), w_in, single, alone)()
    size = x[0].double().abs() @ w_in.double().abs()
    assert dot_error(z[0], y[0].double(), size) < DOT
    assert dot_error(single, y[0].double(), size) < DOT


def test_sparse_norms_biases_and_adds() -> None:
    x, w_in, bias, norm = draw(3, 260), draw(260, 90, seed=1), draw(90, seed=2), Norm(draw(260, seed=3), 1e-5)
    select, own = selection([0.5], (0, 90)), torch.zeros(3, 1, dtype=torch.int32)
    before = draw(3, 90, seed=4)
    y = before.clone()
    batched_sparse_gemv.bind(x, w_in, y, select, own, bias, norm, accumulate=True)()
    read = reference(x.double(), norm)
    expected = batched_sparse_gemv.reference(read, w_in.double(), select.thresholds.double(), (0, 90), bias.double())
    assert dot_error(y, before.double() + expected, read.abs() @ w_in.double().abs()) < 3 * DOT


def test_fault_08_all_none_and_nan() -> None:
    x, w_in = draw(4, 64), draw(64, 20, seed=1)
    own = torch.zeros(4, 1, dtype=torch.int32)
    for threshold, count in ((1e9, 0), (0.0, 64), (-1.0, 64)):
        select, y = selection([threshold], (0, 20)), torch.full((4, 20), NAN)
        batched_sparse_gemv.bind(x, w_in, y, select, own)()
        assert select.kept.tolist() == [count]
        assert bool((y == 0).all()) == (count == 0)
    x[2, 5] = NAN
    select, y = selection([0.5], (0, 20)), torch.zeros(4, 20)
    batched_sparse_gemv.bind(x, w_in, y, select, own)()
    assert bool(y[2].isnan().all()), "NaN must reach the output of its own sequence"


@pytest.mark.parametrize("threads", [1, 2])
def test_sparse_bits_do_not_depend_on_threads(threads: int) -> None:
    import numba

    before = numba.get_num_threads()
    try:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        x, w_in = draw(5, 600), draw(600, 400, seed=1)
        select, own, y = selection([0.6], (0, 400)), torch.zeros(5, 1, dtype=torch.int32), torch.zeros(5, 400)
        batched_sparse_gemv.bind(x, w_in, y, select, own)()
        numba.set_num_threads(1)
        z = torch.zeros(5, 400)
        batched_sparse_gemv.bind(x, w_in, z, select, own)()
        assert torch.equal(y, z)
    finally:
        numba.set_num_threads(before)


def test_silu_product() -> None:
    both = draw(3, 2 * 37) * 5
    act = torch.full((3, 37), NAN)
    silu_product.bind(both, act)()
    expected = silu_product.reference(both.double())
    assert float(((act.double() - expected).abs() / expected.abs().clamp(min=1e-30)).max()) < 4 * EXP


def test_shapes_are_checked() -> None:
    w = draw(8, 6)
    for x in (draw(6), draw(17, 6), draw(2, 5), draw(1, 2, 6)):
        with pytest.raises(ShapeError):
            batched_gemv.bind(x, w, torch.zeros(2, 8))
    with pytest.raises(ShapeError, match="own"):
        batched_sparse_gemv.bind(
            draw(2, 6), draw(6, 8), torch.zeros(2, 8), selection([0.1], (0, 8)), torch.zeros(2, 2, dtype=torch.int32)
        )
    with pytest.raises(ShapeError, match="2I"):
        silu_product.bind(draw(2, 7), torch.zeros(2, 3))
