"""The cache of one sequence: prefixes, forks and what their counters say."""

from __future__ import annotations

import pytest
import torch

from artifact.engine.cache import KVCache, PackedCache
from artifact.errors import UserError
from artifact.shapes import Shape
from tests.inputs import draw

SHAPE = Shape("test", 96, 2, 6, 3, 16, 152, 311, 512, True)


def cache(tokens: int = 10, capacity: int = 20) -> KVCache:
    one = KVCache.allocate(SHAPE, capacity, "cpu", torch.float32)
    one.keys.copy_(draw(*one.keys.shape))
    one.values.copy_(draw(*one.values.shape, seed=1))
    one.set_tokens(tokens)
    return one


def test_fault_10_entries_are_kept_per_kv_head() -> None:
    one = KVCache.allocate(SHAPE, 7, "cpu", torch.float32)
    assert one.keys.shape == one.values.shape == (2, 3, 7, 16)
    assert (one.tokens, one.capacity) == (0, 7) and one.lengths.tolist() == [[0, 0, 0]] * 2
    assert one.position.dtype == one.lengths.dtype == torch.int32


def test_a_fork_holds_the_prefix_and_shares_no_memory() -> None:
    one = cache()
    fork = one.fork(6, 9)
    assert (fork.tokens, fork.capacity, fork.lengths.unique().tolist()) == (6, 9, [6])
    assert torch.equal(fork.keys[:, :, :6], one.keys[:, :, :6])
    assert torch.equal(fork.values[:, :, :6], one.values[:, :, :6])
    fork.keys.fill_(0)
    fork.set_tokens(7)
    assert one.tokens == 10 and one.lengths.unique().tolist() == [10] and bool((one.keys != 0).all())


def test_sharers_have_counters_of_their_own() -> None:
    one = cache()
    other = one.share(4)
    other.set_tokens(5)
    assert (one.tokens, other.tokens) == (10, 5) and other.keys.data_ptr() == one.keys.data_ptr()


@pytest.mark.parametrize(("tokens", "capacity"), [(11, 20), (10, 9), (-1, 5)])
def test_a_fork_that_does_not_fit_is_refused(tokens: int, capacity: int) -> None:
    with pytest.raises(UserError, match=f"{tokens}"):
        cache().fork(tokens, capacity)


@pytest.mark.parametrize("tokens", [-1, 21])
def test_no_more_tokens_than_the_capacity(tokens: int) -> None:
    with pytest.raises(UserError, match=f"a cache of 20 tokens cannot hold {tokens}"):
        cache().set_tokens(tokens)


def test_the_keep_ratio_is_counted_from_ragged_lengths() -> None:
    lengths = torch.tensor([[10, 20, 30], [0, 40, 20]], dtype=torch.int32)
    packed = PackedCache(draw(2, 3, 50, 16), draw(2, 3, 50, 16), lengths, 100)
    assert packed.keep_ratio() == pytest.approx(0.2) and packed.capacity == 50
