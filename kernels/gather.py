"""Gather of the cache entries that a KV method retains into one contiguous buffer per KV head.

    packed[h, j] = cache[h, index[h, j]],  j < counts[h]

Done once after a selection. Bytes moved: the retained entries, read once and written once.
"""

from __future__ import annotations

import torch

from kernels import ShapeError, backend, require_shape


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
) -> None:
    """Fill the first counts[h] slots of the packed cache of every KV head.

    keys, values (kv_heads, capacity, d); index (kv_heads, most) int64, its row h valid up to counts[h]; counts
    (kv_heads,) int32; packed (kv_heads, packed capacity, d). Raises ShapeError when the packed cache is too small or
    an index is out of range.
    """
    kv_heads, capacity, dim = keys.shape
    require_shape("index", index, (kv_heads, index.shape[1]))
    require_shape("counts", counts, (kv_heads,))
    require_shape("packed values", packed_values, tuple(packed_keys.shape))
    most = int(counts.max())
    if (
        packed_keys.shape[0] != kv_heads
        or packed_keys.shape[2] != dim
        or most > min(packed_keys.shape[1], index.shape[1])
    ):
        raise ShapeError(
            f"packed cache {tuple(packed_keys.shape)} cannot hold {most} entries for each of {kv_heads} KV heads"
        )
    if int(index.min()) < 0 or int(index.max()) >= capacity:
        raise ShapeError(f"index reaches {int(index.max())} in a cache of {capacity} entries")
    backend("gather", keys).gather(keys, values, index, counts, packed_keys, packed_values)
