"""Rotation, q/k norms and the append to full and packed caches against float64."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError, rope_append
from tests.inputs import draw, filled
from tests.tolerances import ROTATION

HEADS, KV_HEADS, CAPACITY = 6, 2, 300


def turned(heads: torch.Tensor, inv_freq: torch.Tensor, position: int, scaling: float) -> torch.Tensor:
    """Rotate (heads, d) in float64 as complex numbers a + ib; the angle itself is float32 in every implementation."""
    angle = (inv_freq * float(position)).double()
    a, b = heads.double().chunk(2, dim=-1)
    spun = torch.complex(a, b) * torch.polar(torch.full_like(angle, scaling), angle)
    return torch.cat((spun.real, spun.imag), dim=-1)


def normed(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return heads.double()
    wide = heads.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("scaling", [1.0, 1.25])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("position", [0, 1, 255])
@pytest.mark.parametrize("dim", [2, 64, 80, 128])
def test_rotation_and_append_equal_float64(dim: int, position: int, norm: bool, scaling: float) -> None:
    qkv, inv_freq = draw((HEADS + 2 * KV_HEADS) * dim), 10000.0 ** -(torch.arange(dim // 2) * 2.0 / dim)
    q_norm, k_norm = (draw(dim, seed=3), draw(dim, seed=4)) if norm else (None, None)
    full = filled(KV_HEADS, CAPACITY, dim), filled(KV_HEADS, CAPACITY, dim)
    packed = filled(KV_HEADS, 20, dim), filled(KV_HEADS, 20, dim), torch.tensor([3, 19], dtype=torch.int32)
    query, at = filled(HEADS, dim), torch.tensor([position], dtype=torch.int32)
    rope_append.bind(qkv, inv_freq, at, query, full, packed, q_norm, k_norm, 1e-6, scaling)()

    q, k, v = qkv.view(-1, dim).split((HEADS, KV_HEADS, KV_HEADS))
    expected_q = turned(normed(q, q_norm, 1e-6), inv_freq, position, scaling)
    expected_k = turned(normed(k, k_norm, 1e-6), inv_freq, position, scaling)
    assert float((query - expected_q).abs().max() / expected_q.abs().max()) < ROTATION
    assert float((full[0][:, position] - expected_k).abs().max() / expected_k.abs().max()) < ROTATION
    assert torch.equal(full[1][:, position], v)
    for cache, slots in ((full, [position, position]), (packed, [3, 19])):
        for h, slot in enumerate(slots):
            assert torch.equal(cache[0][h, slot], full[0][h, position]) and torch.equal(cache[1][h, slot], v[h])
            untouched = [s for s in range(cache[0].shape[1]) if s != slot]
            assert bool(cache[0][h, untouched].isnan().all()) and bool(cache[1][h, untouched].isnan().all())


@pytest.mark.parametrize("position", [4095, 131071])
def test_long_positions_turn_by_the_float32_angle(position: int) -> None:
    dim, inv_freq = 64, 10000.0 ** -(torch.arange(32) / 32.0)
    keys, values = torch.empty(1, position + 1, dim), torch.empty(1, position + 1, dim)
    qkv, query = draw(3 * dim), filled(1, dim)
    at = torch.tensor([position], dtype=torch.int32)
    rope_append.bind(qkv, inv_freq, at, query, (keys, values))()
    expected = turned(qkv.view(3, dim)[:1], inv_freq, position, 1.0)
    assert float((query - expected).abs().max() / expected.abs().max()) < ROTATION


def test_fault_13_the_position_is_that_of_the_token_not_the_number_of_packed_rows() -> None:
    dim, inv_freq = 64, 10000.0 ** -(torch.arange(32) / 32.0)
    qkv, query, at = draw(3 * dim), filled(1, dim), torch.tensor([200], dtype=torch.int32)
    full = filled(1, 256, dim), filled(1, 256, dim)
    packed = filled(1, 8, dim), filled(1, 8, dim), torch.tensor([5], dtype=torch.int32)
    rope_append.bind(qkv, inv_freq, at, query, full, packed)()
    expected = turned(qkv.view(3, dim)[1:2], inv_freq, 200, 1.0)
    assert float((packed[0][:, 5] - expected).abs().max()) < 10 * ROTATION


def test_the_torch_helpers_of_prefill_are_the_same_rotation() -> None:
    heads, inv_freq = draw(5, 64), 10000.0 ** -(torch.arange(32) / 32.0)
    weight = draw(64, seed=1)
    got = rope_append.rotate(heads.double(), (inv_freq * 7.0).double(), 1.25)
    assert torch.allclose(got, turned(heads, inv_freq, 7, 1.25), rtol=1e-12)
    assert torch.allclose(rope_append.normalise(heads.double(), weight.double(), 1e-6), normed(heads, weight, 1e-6))
    assert rope_append.normalise(heads, None, 1e-6) is heads


def test_fault_10_a_packed_cache_per_query_head_is_refused() -> None:
    dim = 64
    full = filled(KV_HEADS, 8, dim), filled(KV_HEADS, 8, dim)
    packed = filled(HEADS, 8, dim), filled(HEADS, 8, dim), torch.zeros(HEADS, dtype=torch.int32)
    with pytest.raises(ShapeError, match="packed cache has 6 heads; it is kept per KV head, and there are 2"):
        rope_append.bind(draw(10 * dim), draw(32), torch.zeros(1, dtype=torch.int32), filled(HEADS, dim), full, packed)


@pytest.mark.parametrize(
    ("qkv", "inv_freq", "position", "words"),
    [
        (draw(9 * 64), draw(32), torch.zeros(1, dtype=torch.int32), "qkv has shape"),
        (draw(2, 10 * 64), draw(32), torch.zeros(1, dtype=torch.int32), "qkv has shape"),
        (draw(10 * 64), draw(64), torch.zeros(1, dtype=torch.int32), "inv_freq has shape"),
        (draw(10 * 64), draw(32), torch.zeros(2, dtype=torch.int32), "position has shape"),
        (draw(10 * 64), draw(32), torch.zeros(1, dtype=torch.int64), "position has dtype"),
    ],
)
def test_fault_01_what_does_not_fit_is_a_typed_error(
    qkv: torch.Tensor, inv_freq: torch.Tensor, position: torch.Tensor, words: str
) -> None:
    full = filled(KV_HEADS, 8, 64), filled(KV_HEADS, 8, 64)
    with pytest.raises(ShapeError, match=words):
        rope_append.bind(qkv, inv_freq, position, filled(HEADS, 64), full)
