"""Split-K decode attention: one query token against a full, gathered or ragged cache, grouped queries.

    out_h = sum_j softmax_j(scale q_h . k_j) v_j   over the lengths[kv(h)] + 1 live entries of KV head kv(h) = h //
    group

Bytes moved: sum over KV heads of 2 (lengths + 1) d s_kv; a group of query heads reads its keys and values once.
Entries past the live length are never read, so unused slots may hold anything, NaN included.
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape
from kernels.selection import Selection


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
    select: Selection | None = None,
) -> Launch:
    """Bind attention of one token.

    query (heads, d) float32, keys and values (kv_heads, capacity, d), lengths (kv_heads,) int32 counting the entries
    before this step's own, out (heads * d,) float32. `select`: the selection of the projection that reads `out`.
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
    module = backend("attention", keys)
    if keys.is_cuda:
        return module.bind(query, keys, values, lengths, out, scale, select)
    return module.bind(query, keys, values, lengths, out, scale)
