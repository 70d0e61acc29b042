"""The gather of retained entries, ragged per KV head."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError, gather
from tests.inputs import draw, filled


def test_every_head_takes_its_own_entries_and_only_as_many_as_it_counts() -> None:
    keys, values = draw(3, 40, 16), draw(3, 40, 16, seed=1)
    index = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(h))[:12] for h in range(3)])
    counts = torch.tensor([12, 0, 7], dtype=torch.int32)
    packed = filled(3, 20, 16), filled(3, 20, 16)
    gather.gather(keys, values, index, counts, *packed)
    for cache, source in zip(packed, (keys, values), strict=True):
        for h, count in enumerate(counts.tolist()):
            assert torch.equal(cache[h, :count], source[h, index[h, :count]])
            assert bool(cache[h, count:].isnan().all())


def test_what_does_not_fit_is_named() -> None:
    keys, counts = draw(3, 40, 16), torch.full((3,), 12, dtype=torch.int32)
    index = torch.arange(12).expand(3, -1).contiguous()
    with pytest.raises(ShapeError, match="cannot hold 12 entries for each of 3 KV heads"):
        gather.gather(keys, keys, index, counts, filled(3, 11, 16), filled(3, 11, 16))
    with pytest.raises(ShapeError, match="cannot hold"):
        gather.gather(keys, keys, index, counts, filled(2, 20, 16), filled(2, 20, 16))
    with pytest.raises(ShapeError, match="index reaches 40 in a cache of 40"):
        gather.gather(keys, keys, index + 29, counts, filled(3, 20, 16), filled(3, 20, 16))
    with pytest.raises(ShapeError, match="index"):
        gather.gather(keys, keys, index - 1, counts, filled(3, 20, 16), filled(3, 20, 16))
