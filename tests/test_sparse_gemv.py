"""The thresholded product against a masked dense product in float64, and what it says it read."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ShapeError, sparse_gemv
from kernels.norm import Norm, reference
from tests.inputs import KINDS, NAN, dot_error, draw, filled, selection, vector
from tests.tolerances import DOT

# Widths of q|k|v with one KV head, of 192 and 129 columns, one column, and bounds that no vector width divides.
SEGMENTS = [(0, 1), (0, 129), (0, 192), (0, 64, 128, 192), (0, 65, 97, 129), (0, 127, 128, 129), (0, 576, 768, 960)]


def masked_product(
    x: torch.Tensor, w_in: torch.Tensor, thresholds: list[float], segments: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return (y, sum |w||x|, channels kept per segment) by zeroing channels in a float64 dense product."""
    pieces, sizes, kept = [], [], []
    for t, low, high in zip(thresholds, segments, segments[1:], strict=False):
        skipped = x.abs() <= torch.tensor(t, dtype=torch.float32)
        read = torch.where(skipped, torch.zeros_like(x), x).double()
        pieces.append(w_in[:, low:high].double().T @ read)
        sizes.append(w_in[:, low:high].double().abs().T @ read.abs())
        kept.append(int((~skipped).sum()))
    return torch.cat(pieces), torch.cat(sizes), kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("biased", [False, True])
def test_fault_05_different_thresholds_over_odd_widths(segments: tuple[int, ...], kind: str, biased: bool) -> None:
    depth = 101
    x, w_in = vector(kind, depth), draw(depth, segments[-1], seed=1)
    thresholds = [float(x.abs().quantile(q)) for q in (0.5, 0.2, 0.8)][: len(segments) - 1]
    bias = draw(segments[-1], seed=2) if biased else None
    select, y = selection(thresholds, segments), filled(segments[-1])
    sparse_gemv.bind(x, w_in, y, select, bias)()
    expected, size, kept = masked_product(x, w_in, thresholds, segments)
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    assert dot_error(y, expected, size) < DOT
    assert select.kept.tolist() == kept and len(set(kept)) == len(kept)
    widths = [b - a for a, b in itertools.pairwise(segments)]
    assert sparse_gemv.bytes_moved(w_in, select) == 4 * sum(k * w for k, w in zip(kept, widths, strict=True))


@settings(max_examples=60)
@given(
    depth=st.integers(1, 70),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    levels=st.lists(st.sampled_from([-1.0, 0.0, 0.3, 0.3, 1.0, 5.0]), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_depth_widths_and_thresholds(depth: int, widths: list[int], levels: list[float], seed: int) -> None:
    segments = tuple(sum(widths[:i]) for i in range(len(widths) + 1))
    thresholds = levels[: len(widths)]
    x, w_in = draw(depth, seed=seed), draw(depth, segments[-1], seed=seed + 1)
    x[:: max(1, depth // 3)] = 0.0
    select, y = selection(thresholds, segments), filled(segments[-1])
    sparse_gemv.bind(x, w_in, y, select)()
    expected, size, kept = masked_product(x, w_in, thresholds, segments)
    assert dot_error(y, expected, size + 1e-30) < DOT and select.kept.tolist() == kept


def test_the_torch_reference_is_the_masked_product() -> None:
    x, w_in, segments = draw(50), draw(50, 30, seed=1), (0, 7, 30)
    expected, _, _ = masked_product(x, w_in, [0.5, 1.0], segments)
    got = sparse_gemv.reference(x.double(), w_in.double(), torch.tensor([0.5, 1.0]), segments)
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("threshold", "kept"), [(1e30, 0), (float("inf"), 0), (0.0, 60), (-1.0, 64)])
def test_fault_08_all_none_and_zero_thresholds(threshold: float, kept: int) -> None:
    x, w_in = draw(64), draw(64, 33, seed=1)
    x[:4] = 0.0
    select, y = selection([threshold], (0, 33)), filled(33)
    sparse_gemv.bind(x, w_in, y, select)()
    assert select.kept.tolist() == [kept]
    if kept == 0:
        assert torch.equal(y, torch.zeros(33))
    else:
        assert dot_error(y, w_in.double().T @ x.double(), w_in.double().abs().T @ x.double().abs()) < DOT


def test_fault_08_nothing_kept_still_adds_the_bias() -> None:
    bias, y = draw(33, seed=2), filled(33)
    sparse_gemv.bind(draw(64), draw(64, 33, seed=1), y, selection([1e30], (0, 33)), bias)()
    assert torch.equal(y, bias)


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.5, 1e30])
@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_fault_08_nan_and_inf_are_never_below_a_threshold(bad: float, threshold: float) -> None:
    x, w_in, y = draw(64), draw(64, 33, seed=1), filled(33).zero_()
    x[11] = bad
    select = selection([threshold], (0, 33))
    sparse_gemv.bind(x, w_in, y, select)()
    assert not bool(torch.isfinite(y).any()) and int(select.kept) >= 1


def test_a_channel_exactly_at_its_threshold_is_skipped() -> None:
    x = torch.tensor([0.5, -0.5, 0.5000001, 2.0])
    select, y = selection([0.5], (0, 2)), filled(2)
    sparse_gemv.bind(x, torch.ones(4, 2), y, select)()
    assert select.kept.tolist() == [2] and torch.allclose(y, torch.full((2,), 2.5000001))


def test_skipped_rows_are_not_read() -> None:
    x, w_in, y = draw(64), draw(64, 33, seed=1), filled(33)
    w_in[x.abs() <= 0.7] = NAN
    sparse_gemv.bind(x, w_in, y, selection([0.7], (0, 33)))()
    assert bool(torch.isfinite(y).all())


def test_fault_02_and_03_first_and_second_call_agree_on_a_used_output() -> None:
    x, w_in, y, bias = draw(64), draw(64, 97, seed=1), filled(97), draw(97, seed=2)
    select = selection([0.3, 0.9], (0, 33, 97))
    launch = sparse_gemv.bind(x, w_in, y, select, bias)
    launch()
    first, counts = y.clone(), select.kept.clone()
    launch()
    assert torch.equal(y, first) and torch.equal(select.kept, counts)
    y.fill_(NAN)
    launch()
    assert torch.equal(y, first)


@pytest.mark.parametrize("shape", [(2, 1, 64), (1, 2, 64), (2, 64), (1, 64)])
def test_fault_01_a_batch_of_tokens_is_a_typed_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"one token, shape \(K,\)"):
        sparse_gemv.bind(draw(*shape), draw(64, 9), filled(9), selection([0.1], (0, 9)))


def test_segments_must_end_at_the_width() -> None:
    with pytest.raises(ShapeError, match="segments end at 8, the weight has 9 columns"):
        sparse_gemv.bind(draw(64), draw(64, 9), filled(9), selection([0.1], (0, 8)))
    with pytest.raises(ShapeError, match="bias has shape"):
        sparse_gemv.bind(draw(64), draw(64, 9), filled(9), selection([0.1], (0, 9)), draw(8))


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("depth", [1, 3, 129, 1100, 9000])
def test_channels_divided_into_parts_are_all_counted_once(depth: int, keep: float) -> None:
    x, w_in, segments = vector("outliers", depth), draw(depth, 40, seed=1), (0, 11, 30, 40)
    # The first two segments share a threshold, the last has its own.
    first = float(x.abs().quantile(1.0 - keep)) if keep < 1 else -1.0
    thresholds = [first, first, 0.5]
    select, y = selection(thresholds, segments), filled(40)
    launch = sparse_gemv.bind(x, w_in, y, select)
    launch()
    expected, size, kept = masked_product(x, w_in, thresholds, segments)
    assert dot_error(y, expected, size + 1e-30) < DOT and select.kept.tolist() == kept
    # Fewer channels than before: what an earlier call listed must not be read again.
    x[::2] = 0.0
    launch()
    expected, size, kept = masked_product(x, w_in, thresholds, segments)
    assert dot_error(y, expected, size + 1e-30) < DOT
    assert select.kept.tolist() == kept


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["normal", "outliers"])
def test_the_normed_vector_is_compared_and_the_product_is_added(kind: str, biased: bool) -> None:
    depth, segments = 101, (0, 65, 97, 129)
    x, w_in, y, weight = vector(kind, depth), draw(depth, 129, seed=1), draw(129, seed=5), draw(depth, seed=3)
    bias, before = draw(129, seed=2) if biased else None, y.double()
    normed = reference(x.double(), Norm(weight, 1e-5)).float()
    # Halfway between two neighbours: no channel is within rounding of its threshold.
    sizes = normed.abs().sort().values
    thresholds = [float((sizes[k] + sizes[k + 1]) / 2) for k in (50, 20, 80)]
    select = selection(thresholds, segments)
    sparse_gemv.bind(x, w_in, y, select, bias, Norm(weight, 1e-5), accumulate=True)()
    expected, size, kept = masked_product(normed, w_in, thresholds, segments)
    added = before if bias is None else before + bias.double()
    assert dot_error(y, expected + added, size + added.abs() + before.abs()) < 2 * DOT
    assert select.kept.tolist() == kept == [50, 80, 20]


def test_nothing_kept_adds_nothing() -> None:
    y = draw(33, seed=2)
    before = y.clone()
    sparse_gemv.bind(draw(64), draw(64, 33, seed=1), y, selection([1e30], (0, 33)), accumulate=True)()
    assert torch.equal(y, before)
