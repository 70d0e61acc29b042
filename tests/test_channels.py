"""Attention over pruned channels against float64 on vectors that were expanded one by one, and what is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from artifact.keep_ratio import pruned_key_bytes
from kernels import ShapeError, channels
from kernels.channels import Pruned, pack_bytes, pack_words, unpack_bytes, unpack_words
from tests.inputs import NAN, draw, filled, relative
from tests.tolerances import ATTENTION

pytestmark = pytest.mark.usefixtures("one_thread")


def pruned(kv_heads: int, tokens: int, dim: int, width: int, *, signs: bool = False, fill: bool = False,
           value_width: int | None = None, seed: int = 0) -> Pruned:  # fmt: skip
    """A packed part with random masks."""

    def some(count: int, own: int) -> torch.Tensor:
        order = torch.rand(kv_heads, tokens, dim, generator=torch.Generator().manual_seed(own)).argsort(-1)
        return torch.zeros(kv_heads, tokens, dim, dtype=torch.bool).scatter(2, order[..., :count], True)

    values = draw(kv_heads, tokens, value_width or dim, seed=seed + 1)
    return Pruned(
        dim, draw(kv_heads, tokens, width, seed=seed), pack_words(some(width, seed)), None,
        pack_bytes(draw(kv_heads, tokens, dim - width, seed=seed + 2) < 0) if signs else None,
        draw(kv_heads, tokens, seed=seed + 3).abs() if fill else None, 0.01, values,
        pack_words(some(value_width, seed + 4)) if value_width else None,
    )  # fmt: skip


def tail(lengths: list[int], capacity: int, dim: int) -> channels.Tail:
    """A dense tail whose unused slots hold NaN."""
    keys, values = draw(len(lengths), capacity, dim, seed=7), draw(len(lengths), capacity, dim, seed=8)
    for h, length in enumerate(lengths):
        keys[h, length + 1 :], values[h, length + 1 :] = NAN, NAN
    return keys, values, torch.tensor(lengths, dtype=torch.int32)


def one_by_one(packed: Pruned) -> torch.Tensor:
    """Keys expanded channel by channel, in plain Python."""
    kv_heads, tokens, _ = packed.kept.shape
    out = torch.zeros(kv_heads, tokens, packed.dim, dtype=torch.float64)
    for h in range(kv_heads):
        for j in range(tokens):
            kept = gone = 0
            for c in range(packed.dim):
                if packed.channels is not None:
                    bit = c in packed.channels[h].tolist()
                else:
                    bit = bool((int(packed.mask[h, j, c // 32]) >> (c % 32)) & 1)
                if bit:
                    out[h, j, c] = packed.kept[h, j, kept]
                    kept += 1
                elif packed.channels is None:
                    size = packed.constant if packed.fill is None else float(packed.fill[h, j])
                    flip = packed.signs is not None and (int(packed.signs[h, j, gone // 8]) >> (gone % 8)) & 1
                    out[h, j, c] = -size if flip else size
                    gone += 1
    return out


def attend(packed: Pruned, lengths: list[int], heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    query, end, out = (
        draw(heads, packed.dim, seed=11),
        tail(lengths, max(lengths) + 5, packed.dim),
        filled(heads * packed.dim),
    )
    channels.bind(query, packed, end, out, 0.125)()
    return out, channels.reference(query.double(), packed, end, 0.125)


VARIANTS = [{}, {"fill": True}, {"fill": True, "signs": True}, {"value_width": 20}, {"signs": True}]


@pytest.mark.parametrize("options", VARIANTS)
def test_expansion_equals_one_channel_at_a_time(options: dict[str, object]) -> None:
    packed = pruned(2, 9, 80, 13, **options)
    assert relative(packed.keys_expanded(), one_by_one(packed)) < 1e-6


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(("tokens", "lengths"), [(1, [0, 0, 0]), (256, [255, 3, 256]), (700, [5, 0, 30])])
def test_attention_equals_float64_on_expanded_vectors(
    options: dict[str, object], tokens: int, lengths: list[int]
) -> None:
    got, expected = attend(pruned(3, tokens, 64, 13, **options), lengths, 9)
    assert relative(got, expected) < ATTENTION


def test_shared_channels_meet_a_shortened_query() -> None:
    shared = torch.stack(
        [torch.randperm(64, generator=torch.Generator().manual_seed(h))[:20].sort().values for h in range(3)]
    )
    base = pruned(3, 300, 64, 20)
    packed = replace(base, mask=None, channels=shared.int())
    assert (
        relative(packed.keys_expanded()[:, :4], one_by_one(replace(packed, kept=packed.kept[:, :4].contiguous())))
        < 1e-6
    )
    got, expected = attend(packed, [40, 0, 3], 9)
    assert relative(got, expected) < ATTENTION


@given(st.integers(1, 128), st.integers(0, 50))
def test_bits_survive_packing(size: int, seed: int) -> None:
    bits = draw(3, 2, size, seed=seed) > 0
    assert torch.equal(unpack_words(pack_words(bits), size), bits)
    assert torch.equal(unpack_bytes(pack_bytes(bits), size), bits)


@pytest.mark.parametrize(
    ("width", "expected"), [(26, 52 + 16 + 13 + 2), (64, 128 + 16 + 8 + 2), (128, 256 + 16 + 0 + 2)]
)
def test_stored_bytes_are_those_of_the_account(width: int, expected: int) -> None:
    """In half precision at 128 channels; one statistic per key."""
    packed = pruned(2, 5, 128, width, fill=True, signs=True)
    assert packed.fill is not None
    half = replace(packed, kept=packed.kept.half(), fill=packed.fill.half(), values=packed.values.half())
    assert half.key_bytes() == expected == pruned_key_bytes(128, width, 2, signs=True, statistics=1)
    assert half.stored_bytes() == 10 * (expected + 256)
    assert half.stored_bytes() <= half.sector_bytes() <= half.stored_bytes() + 2 * 32 * 2 * len(half.stored())


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    packed, end = pruned(3, 10, 64, 13), tail([0, 0, 0], 4, 64)
    with pytest.raises(ShapeError, match="a packed part of 64 channels"):
        channels.bind(draw(9, 64), replace(packed, mask=None), end, filled(576), 1.0)
    with pytest.raises(ShapeError, match="signs has shape"):
        wrong = replace(packed, signs=torch.zeros(3, 10, 1, dtype=torch.uint8))
        channels.bind(draw(9, 64), wrong, end, filled(576), 1.0)
    with pytest.raises(ShapeError, match="10 query heads do not divide over 3 KV heads"):
        channels.bind(draw(10, 64), packed, end, filled(640), 1.0)
