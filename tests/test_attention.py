"""Decode attention against float64: every group and head size, ragged and odd lengths, unused slots full of NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ShapeError, attention, rope_append
from kernels.rope_append import Packed
from tests.inputs import NAN, draw, filled
from tests.tolerances import ATTENTION, ATTENTION_LARGE_SCORES, EXP, ROTATION

# Lengths around the block of 256 and the split of 512 keys; the step's own entry comes on top of each.
EDGES = [0, 1, 254, 255, 256, 257, 510, 511, 512, 513, 1025]
# (heads, kv_heads, d). Each pair of group and d is compiled anew, so the pairs cover all values rather than all pairs.
SHAPES = [(1, 1, 256), (9, 3, 64), (4, 1, 80), (5, 1, 96), (12, 2, 128), (7, 1, 64), (16, 1, 64)]
# Models whose groups others did not support: 24/8 and 9/3 heads are group 3, 28/4 is 7, 24/4 is 6.
MODELS = [(24, 8, 64), (28, 4, 64), (24, 4, 128), (9, 3, 64)]


pytestmark = pytest.mark.usefixtures("one_thread")


def caches(kv_heads: int, capacity: int, dim: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values whose slots past the live ones hold NaN."""
    keys, values = draw(kv_heads, capacity, dim, seed=1), draw(kv_heads, capacity, dim, seed=2)
    for head, length in enumerate(lengths):
        keys[head, length + 1 :] = NAN
        values[head, length + 1 :] = NAN
    return keys, values


def expected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Return (heads, d) in float64, one query head at a time."""
    group = query.shape[0] // keys.shape[0]
    rows = []
    for head, q in enumerate(query.double()):
        live = lengths[head // group] + 1
        score = scale * (keys[head // group, :live].double() @ q)
        weight = torch.exp(score - score.max())
        rows.append(weight @ values[head // group, :live].double() / weight.sum())
    return torch.stack(rows)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Run the kernel twice on an output full of NaN and return (heads, d)."""
    out = filled(query.numel())
    launch = attention.bind(query, keys, values, torch.tensor(lengths, dtype=torch.int32), out, scale)
    launch()
    first = out.clone()
    launch()
    assert out.numpy().tobytes() == first.numpy().tobytes()
    return first.view(query.shape)


def error(out: torch.Tensor, wide: torch.Tensor, values: torch.Tensor) -> float:
    return float((out.double() - wide).abs().max()) / float(values.nan_to_num(0.0).abs().max())


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_fault_21_nan_in_unused_slots_never_reaches_the_output(
    heads: int, kv_heads: int, dim: int, length: int
) -> None:
    lengths = [length] * kv_heads
    keys, values = caches(kv_heads, length + 40, dim, lengths)
    query = draw(heads, dim)
    out = attend(query, keys, values, lengths, dim**-0.5)
    assert error(out, expected(query, keys, values, lengths, dim**-0.5), values) < ATTENTION


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), MODELS)
def test_fault_23_unusual_groups_with_ragged_lengths(heads: int, kv_heads: int, dim: int) -> None:
    lengths = [EDGES[h % len(EDGES)] for h in range(kv_heads)]
    keys, values = caches(kv_heads, 1100, dim, lengths)
    query = draw(heads, dim)
    out = attend(query, keys, values, lengths, 0.1)
    assert error(out, expected(query, keys, values, lengths, 0.1), values) < ATTENTION


def test_a_full_cache_uses_its_last_slot() -> None:
    keys, values = caches(3, 512, 64, [511] * 3)
    values[:, 511] += 100.0
    query = draw(9, 64)
    out = attend(query, keys, values, [511] * 3, 0.125)
    assert error(out, expected(query, keys, values, [511] * 3, 0.125), values) < ATTENTION


def test_one_launch_serves_every_length() -> None:
    keys, values = caches(3, 1030, 64, [1029] * 3)
    query, out, lengths = draw(9, 64), filled(576), torch.zeros(3, dtype=torch.int32)
    launch = attention.bind(query, keys, values, lengths, out, 0.125)
    for length in (1025, 0, 511, 512, 3):
        lengths.fill_(length)
        launch()
        wide = expected(query, keys, values, [length] * 3, 0.125)
        assert error(out.view(9, 64), wide, values) < ATTENTION


def test_uniform_scores_give_the_mean_of_the_values() -> None:
    lengths = [700, 0, 300]
    _, values = caches(3, 800, 64, lengths)
    out = attend(draw(9, 64), torch.zeros(3, 800, 64), values, lengths, 0.125)
    mean = torch.stack([values[h // 3, : lengths[h // 3] + 1].double().mean(0) for h in range(9)])
    assert error(out, mean, values) < ATTENTION


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_ten_thousand_neither_overflow_nor_vanish(sign: float) -> None:
    lengths = [700, 5, 300]
    keys, values = caches(3, 800, 64, lengths)
    query = draw(9, 64) * 1000.0 * sign
    out = attend(query, keys, values, lengths, 1.0)
    assert error(out, expected(query, keys, values, lengths, 1.0), values) < ATTENTION_LARGE_SCORES


def test_the_heaviest_key_may_lie_in_any_split() -> None:
    """Each later split rescales the earlier ones; a later maximum far above the first must erase them exactly."""
    for where in (0, 255, 256, 511, 512, 1000, 1025):
        keys, values = caches(3, 1100, 64, [1025] * 3)
        query = draw(9, 64)
        keys[:, where] = query[::3] * 50.0
        out = attend(query, keys, values, [1025] * 3, 0.125)
        assert error(out, expected(query, keys, values, [1025] * 3, 0.125), values) < ATTENTION


@pytest.mark.parametrize("where", [0, 300, 600])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("which", ["query", "keys", "values"])
def test_fault_08_nan_and_inf_in_live_entries_propagate(which: str, bad: float, where: int) -> None:
    keys, values = caches(3, 700, 64, [600] * 3)
    query = draw(9, 64)
    if which == "query":
        query[4, 7] = bad
        broken = [4]
    else:
        (keys if which == "keys" else values)[1, where, 7] = bad
        broken = [3, 4, 5]
    out = attend(query, keys, values, [600] * 3, 0.125)
    finite = torch.isfinite(out)
    # An inf key is either the maximum (NaN after inf - inf) or, for a head that scores it -inf, correctly ignored.
    wide = expected(query, keys, values, [600] * 3, 0.125)
    assert torch.equal(finite, torch.isfinite(wide))
    assert all(not bool(finite[h].all()) for h in broken) or (which == "keys" and bad == float("inf"))
    assert bool(finite[[h for h in range(9) if h not in broken]].all())


def test_the_torch_reference_equals_the_plain_sum() -> None:
    keys, values = caches(3, 60, 64, [50, 0, 20])
    query, lengths = draw(9, 64), torch.tensor([50, 0, 20])
    got = attention.reference(query.double(), keys.double(), values.double(), lengths, 0.125)
    assert torch.allclose(got.view(9, 64), expected(query, keys, values, [50, 0, 20], 0.125), rtol=1e-12)


@given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 16),
    lengths=st.lists(st.integers(0, 10**6), min_size=8, max_size=8),
    item=st.sampled_from([torch.float16, torch.float32]),
)
def test_fault_20_bytes_are_those_of_kv_heads_whatever_the_query_heads(
    kv_heads: int, group: int, lengths: list[int], item: torch.dtype
) -> None:
    keys = torch.empty(kv_heads, 0, 128, dtype=item)
    moved = attention.bytes_moved(keys, torch.tensor(lengths[:kv_heads], dtype=torch.int32))
    assert moved == sum(n + 1 for n in lengths[:kv_heads]) * 2 * 128 * keys.element_size()
    del group  # the byte count has no access to it: that is the point


@pytest.mark.parametrize(
    ("query", "keys", "words"),
    [
        (draw(8, 64), draw(3, 10, 64), "8 query heads do not divide over 3 KV heads"),
        (draw(9, 32), draw(3, 10, 64), "keys has shape"),
        (draw(1, 9, 64), draw(3, 10, 64), r"must be \(heads, d\)"),
        (draw(9, 64), draw(1, 3, 10, 64), r"must be \(heads, d\)"),
        (draw(9, 64), draw(3, 64, 10).transpose(1, 2), "contiguous"),
    ],
)
def test_fault_01_what_does_not_fit_is_a_typed_error(query: torch.Tensor, keys: torch.Tensor, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        attention.bind(query, keys, keys, torch.zeros(3, dtype=torch.int32), filled(576), 0.1)


def test_lengths_must_be_int32() -> None:
    with pytest.raises(ShapeError, match="lengths has dtype"):
        attention.bind(draw(9, 64), draw(3, 5, 64), draw(3, 5, 64), torch.zeros(3, dtype=torch.int64), filled(576), 0.1)


def test_the_exponential_keeps_its_promise() -> None:
    """In a loop whose compiler may reassociate, as the kernels use it."""
    import numba

    from kernels.cpu.common import FASTMATH, exp32

    @numba.njit(fastmath=FASTMATH)
    def exponentials(values):  # type: ignore[no-untyped-def]
        out = np.empty_like(values)
        for i in range(values.shape[0]):
            out[i] = exp32(values[i])
        return out

    points = torch.cat((torch.linspace(-87, 88, 4001), torch.tensor([-1e-8, 0.0, 1e-8]))).numpy()
    got = torch.from_numpy(exponentials(points)).double()
    wide = torch.from_numpy(points).double().exp()
    assert float(((got - wide) / wide).abs().max()) < EXP
    assert np.isnan(exponentials(np.full(9, NAN, dtype=np.float32))).all()
    assert exponentials(np.full(9, -1e30, dtype=np.float32)).max() < 2e-38


@pytest.mark.parametrize("read_packed", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_a_step_is_rotation_and_append_then_attention(normed: bool, read_packed: bool) -> None:
    heads, kv_heads, dim, at = 9, 3, 64, 600
    qkv, inv_freq = draw((heads + 2 * kv_heads) * dim), 10000.0 ** -(torch.arange(32) / 32.0)
    position = torch.tensor([at], dtype=torch.int32)
    norms = (draw(dim, seed=3), draw(dim, seed=4), 1e-6, 1.25) if normed else (None, None, 1e-6, 1.25)
    lengths = [520, 0, 255] if read_packed else [at] * kv_heads
    live = torch.tensor(lengths, dtype=torch.int32)

    def stores() -> tuple[tuple[torch.Tensor, torch.Tensor], Packed | None]:
        full = caches(kv_heads, at + 30, dim, [at - 1] * kv_heads)
        short = caches(kv_heads, 530, dim, [n - 1 for n in lengths])
        return full, (*short, live) if read_packed else None

    full, packed = stores()
    out = filled(heads * dim)
    launch = attention.bind_step(qkv, inv_freq, position, full, packed, live, out, 0.125, *norms)
    launch()
    first = out.clone()
    launch()
    assert torch.equal(out, first), "the same entry is written again in place"

    query, apart = filled(heads, dim), filled(heads * dim)
    other, other_packed = stores()
    rope_append.bind(qkv, inv_freq, position, query, other, other_packed, *norms)()
    keys, values = other if other_packed is None else other_packed[:2]
    attention.bind(query, keys, values, live, apart, 0.125)()
    assert error(out.view(heads, dim), apart.view(heads, dim).double(), values) < ATTENTION
    for ours, theirs in zip((*full, *(packed or ())), (*other, *(other_packed or ())), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=10 * ROTATION, equal_nan=True)
    assert error(out.view(heads, dim), expected(query, keys, values, lengths, 0.125), values) < ATTENTION


def test_a_step_that_does_not_fit_is_named() -> None:
    full, at = (draw(3, 10, 64), draw(3, 10, 64)), torch.zeros(1, dtype=torch.int32)
    live, out = torch.zeros(3, dtype=torch.int32), filled(9 * 64)
    with pytest.raises(ShapeError, match="qkv has shape"):
        attention.bind_step(draw(14 * 64), draw(32), at, full, None, live, out, 0.1)
    with pytest.raises(ShapeError, match="8 query heads do not divide"):
        attention.bind_step(draw(14 * 64), draw(32), at, full, None, live, filled(8 * 64), 0.1)
    packed = (draw(9, 8, 64), draw(9, 8, 64), torch.zeros(9, dtype=torch.int32))
    with pytest.raises(ShapeError, match="packed cache has 9 heads; it is kept per KV head, and there are 3"):
        attention.bind_step(draw(15 * 64), draw(32), at, full, packed, live, out, 0.1)
