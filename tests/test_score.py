"""SnapKV scores against a float64 sum written out row by row, and their pooling."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError, score
from tests.inputs import NAN, draw
from tests.tolerances import SCORES

pytestmark = pytest.mark.usefixtures("one_thread")


def expected(queries: torch.Tensor, keys: torch.Tensor, scale: float, aggregate: str) -> torch.Tensor:
    heads, rows, _ = queries.shape
    kv_heads, tokens, _ = keys.shape
    group = heads // kv_heads
    per_head = torch.zeros(heads, tokens, dtype=torch.float64)
    for head in range(heads):
        logits = scale * (queries[head].double() @ keys[head // group].double().T)
        for row in range(rows):
            seen = tokens - rows + row + 1
            weight = torch.exp(logits[row, :seen] - logits[row, :seen].max())
            per_head[head, :seen] += weight / weight.sum()
    grouped = per_head.view(kv_heads, group, tokens)
    return grouped.max(1).values if aggregate == "max" else grouped.sum(1) / group


def pooled(scores: torch.Tensor, pool: str, width: int) -> torch.Tensor:
    half, count = width // 2, scores.shape[1]
    windows = [scores[:, max(0, j - half) : j + half + 1] for j in range(count)]
    if pool == "none":
        return scores
    return torch.stack([w.amax(1) if pool == "max" else w.mean(1) for w in windows], 1)


@pytest.mark.parametrize("aggregate", ["mean", "max"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (5, 1, 96), (16, 1, 16)])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (16, 16), (17, 16), (200, 16), (129, 1)])
def test_scores_equal_float64(tokens: int, rows: int, heads: int, kv_heads: int, dim: int, aggregate: str) -> None:
    queries, keys = draw(heads, rows, dim) * 3, draw(kv_heads, tokens, dim, seed=1)
    got = score.snapkv(queries, keys, dim**-0.5, aggregate=aggregate)
    wide = expected(queries, keys, dim**-0.5, aggregate)
    assert float((got - wide).abs().max() / wide.max()) < SCORES
    reference = score.reference(queries.double(), keys.double(), dim**-0.5, aggregate=aggregate)
    assert torch.allclose(reference, wide, rtol=1e-10, atol=1e-14)
    if aggregate == "mean":
        assert torch.allclose(got.sum(1), torch.full((kv_heads,), float(rows)), rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 7, 21, 301])
@pytest.mark.parametrize("pool", ["none", "max", "avg"])
def test_pooling_is_centred_and_keeps_the_length(pool: str, width: int) -> None:
    queries, keys = draw(4, 8, 16), draw(2, 150, 16, seed=1)
    plain = score.snapkv(queries, keys, 0.25).double()
    got = score.snapkv(queries, keys, 0.25, pool, width)
    wide = pooled(plain, pool, width)
    assert got.shape == (2, 150) and float((got - wide).abs().max() / wide.max()) < SCORES


def test_rows_see_nothing_later_than_themselves() -> None:
    queries, keys = draw(2, 4, 16), draw(2, 50, 16, seed=1)
    keys[:, -1] = queries[:, 0] * 1000  # the last key would win every row, but only the last row may see it
    got = score.snapkv(queries, keys, 0.25)
    assert bool((got[:, -1] <= 1.0 + 1e-6).all())


def test_large_scores_neither_overflow_nor_vanish() -> None:
    queries, keys = draw(4, 8, 16) * 1e4, draw(2, 60, 16, seed=1)
    got = score.snapkv(queries, keys, 1.0)
    assert torch.allclose(got.sum(1), torch.full((2,), 8.0), rtol=1e-5)


def test_fault_08_nan_reaches_the_scores_of_its_head() -> None:
    queries, keys = draw(4, 8, 16), draw(2, 60, 16, seed=1)
    keys[1, 10, 3] = NAN
    got = score.snapkv(queries, keys, 0.25)
    assert bool(got[0].isfinite().all()) and bool(got[1, :50].isnan().all())


@pytest.mark.parametrize(
    ("rows", "pool", "width", "aggregate", "error", "words"),
    [
        (8, "median", 3, "mean", ValueError, "pool 'median'"),
        (8, "max", 4, "mean", ValueError, "width 4 must be odd"),
        (8, "max", 0, "mean", ValueError, "width 0 must be odd"),
        (8, "max", 3, "sum", ValueError, "aggregate 'sum'"),
        (61, "max", 3, "mean", ShapeError, "do not fit keys"),
        (0, "max", 3, "mean", ShapeError, "do not fit keys"),
    ],
)
def test_unknown_settings_and_shapes_are_named(
    rows: int, pool: str, width: int, aggregate: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        score.snapkv(draw(4, rows, 16), draw(2, 60, 16), 0.25, pool, width, aggregate)
    with pytest.raises(ShapeError, match="do not fit keys"):
        score.snapkv(draw(3, 8, 16), draw(2, 60, 16), 0.25)
