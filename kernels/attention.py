"""Split-K decode attention: one query token against a full, gathered or ragged cache, grouped queries; alone, or with
the rotation and append that come before it in a step.

    out_h = sum_j softmax_j(scale q_h . k_j) v_j   over the lengths[kv(h)] + 1 live entries of KV head kv(h) = h //
    group

Bytes moved: sum over KV heads of 2 (lengths + 1) d s_kv; a group of query heads reads its keys and values once.
Entries past the live length are never read, so unused slots may hold anything, NaN included.
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape
from kernels.rope_append import Packed, check


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return (heads * d,) attention outputs in the dtype of the inputs; lengths[h] + 1 entries of each KV head are
    live.
    """
    heads, dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    out = torch.empty(heads, dim, dtype=query.dtype)
    for h in range(kv_heads):
        live = int(lengths[h]) + 1
        q = query[h * group : (h + 1) * group]
        weights = torch.softmax(scale * q @ keys[h, :live].T, dim=-1)
        out[h * group : (h + 1) * group] = weights @ values[h, :live]
    return out.reshape(-1)


def bytes_moved(keys: torch.Tensor, lengths: torch.Tensor) -> int:
    """Return the cache bytes that one call reads: keys and values of the live entries, counted by KV heads."""
    live = int((lengths + 1).sum())
    return 2 * live * keys.shape[-1] * keys.element_size()


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> Launch:
    """Bind attention of one token.

    query (heads, d) float32, keys and values (kv_heads, capacity, d), lengths (kv_heads,) int32 counting the entries
    before this step's own, out (heads * d,) float32.
    """
    if query.dim() != 2 or keys.dim() != 3:
        raise ShapeError(
            f"query {tuple(query.shape)} must be (heads, d) and keys {tuple(keys.shape)} (kv_heads, capacity, d)"
        )
    heads, dim = query.shape
    kv_heads, capacity, _ = keys.shape
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    require_shape("keys", keys, (kv_heads, capacity, dim))
    require_shape("values", values, (kv_heads, capacity, dim))
    require_shape("lengths", lengths, (kv_heads,))
    require_shape("out", out, (heads * dim,))
    return backend("attention", keys).bind(query, keys, values, lengths, out, scale)


def bind_step(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    full: tuple[torch.Tensor, torch.Tensor],
    packed: Packed | None,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    scaling: float = 1.0,
) -> Launch:
    """Bind `rope_append` and attention as one operation: qkv ((heads + 2 kv_heads) d,) float32 as projected.

    The new entry goes to slot `position` of `full` and, when given, to slot packed lengths[h] of `packed`, which is
    then the cache that is read. lengths (kv_heads,) int32: entries before this step's own of the cache that is read.
    """
    kv_heads, capacity, dim = full[0].shape
    heads = out.shape[0] // dim
    if capacity == 0:
        raise ShapeError("the full cache has no room for the new entry; append it to rows of its own and use `bind`")
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    check(qkv, inv_freq, position, (heads, dim), full, packed)
    if packed is not None:
        require_shape("packed values", packed[1], tuple(packed[0].shape))
    require_shape("lengths", lengths, (kv_heads,))
    require_shape("out", out, (heads * dim,))
    module = backend("attention", full[0])
    return module.bind_step(qkv, inv_freq, position, full, packed, lengths, out, scale, q_norm, k_norm, eps, scaling)
