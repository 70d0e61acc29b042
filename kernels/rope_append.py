"""Rotary position embedding of queries and keys, and the append to the cache.

    head <- head / rms(head) * norm        (Qwen3's q/k norm, when given)
    (a, b) <- (a cos - b sin, b cos + a sin),   a, b the halves of a head, angle = position inv_freq

The new key and value go to slot `position` of the full cache, which always keeps growing, and to slot lengths[h] of
the packed cache when a KV method is active. The position is the number of tokens before this one, whatever a method
evicted. Bytes moved: written, not read; a few vectors.
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape

Packed = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # keys, values (kv_heads, capacity, d); lengths (kv_heads,) int32
Rows = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]  # keys, values (rows, d) of all heads; offsets (kv_heads,) int64; lengths (kv_heads,) int32


def rotate(heads: torch.Tensor, angles: torch.Tensor, scaling: float = 1.0) -> torch.Tensor:
    """Rotate (..., d) heads by halves; angles (..., d/2) broadcast against them."""
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    a, b = heads.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def normalise(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Apply the per-head RMSNorm of Qwen3, or nothing when weight is None; heads (..., d)."""
    if weight is None:
        return heads
    return heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * weight


def bind(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    query: torch.Tensor,
    full: tuple[torch.Tensor, torch.Tensor],
    packed: Packed | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    scaling: float = 1.0,
) -> Launch:
    """Bind rotation and append for one token.

    qkv ((heads + 2 kv_heads) d,) float32, inv_freq (d/2,) float32, position (1,) int32, query (heads, d) float32
    output, full and packed keys and values (kv_heads, capacity, d). Writing past a capacity is the caller's error:
    the step checks before it runs.
    """
    check(qkv, inv_freq, position, (query.shape[0], query.shape[1]), full, packed)
    return backend("rope_append", full[0]).bind(
        qkv, inv_freq, position, query, full, packed, q_norm, k_norm, eps, scaling
    )


def check(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    query: tuple[int, int],
    full: tuple[torch.Tensor, torch.Tensor],
    packed: Packed | None,
) -> None:
    """Raise ShapeError unless everything fits `query` = (heads, d) and the full cache."""
    heads, dim = query
    kv_heads, capacity, _ = full[0].shape
    require_shape("qkv", qkv, ((heads + 2 * kv_heads) * dim,))
    require_shape("inv_freq", inv_freq, (dim // 2,))
    require_shape("position", position, (1,))
    for tensor in full:
        require_shape("cache", tensor, (kv_heads, capacity, dim))
    if packed is not None:
        if packed[0].shape[0] != kv_heads:
            raise ShapeError(
                f"the packed cache has {packed[0].shape[0]} heads; it is kept per KV head, and there are {kv_heads}"
            )
        require_shape("lengths", packed[2], (kv_heads,))


def bind_rows(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    query: torch.Tensor,
    full: tuple[torch.Tensor, torch.Tensor],
    rows: Rows,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> Launch:
    """Bind rotation and append to flat storage: the new entry of head h goes to row offsets[h] + lengths[h].

    It goes to slot `position` of the full cache as well, unless that has a capacity of 0.
    """
    kv_heads, _, dim = full[0].shape
    check(qkv, inv_freq, position, (query.shape[0], query.shape[1]), full, None)
    keys, values, offsets, lengths = rows
    require_shape("row keys", keys, (keys.shape[0], dim))
    require_shape("row values", values, tuple(keys.shape))
    require_shape("offsets", offsets, (kv_heads,))
    require_shape("lengths", lengths, (kv_heads,))
    return backend("rope_append", keys).bind_rows(qkv, inv_freq, position, query, full, rows, q_norm, k_norm, eps)
