"""Decode attention over flat storage in which every KV head has a length of its own, whole or by chosen pages.

    out_h = sum_j softmax_j(scale q_h . k_j) v_j      j over rows offsets[kv] .. offsets[kv] + lengths[kv] of KV head kv

Head kv owns consecutive rows of `keys` and `values` (rows, d); nothing is padded to the longest head, and the work is
divided over heads by what they really hold. With `Pages` a head reads only the entries of its chosen pages (page p
holds entries p size .. p size + size - 1); a head whose count is -1 reads everything.
Bytes moved: 2 d s_kv for every entry read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import Launch, ShapeError, backend, require_shape

SPLIT = 256  # entries of one unit of work; page sizes divide it


@dataclass(frozen=True)
class Pages:
    """chosen (kv_heads, most) int32 page numbers in ascending order, the first counts[h] of each row valid;
    counts (kv_heads,) int32, -1 for a head that reads everything; size: entries per page.
    """

    chosen: torch.Tensor
    counts: torch.Tensor
    size: int


def read_rows(head: int, lengths: torch.Tensor, pages: Pages | None) -> torch.Tensor:
    """Return the entry numbers of one head, its own newest one included, that a call reads."""
    live = torch.arange(int(lengths[head]) + 1)
    if pages is None or int(pages.counts[head]) < 0:
        return live
    chosen = pages.chosen[head, : int(pages.counts[head])].long().cpu()
    entries = (chosen[:, None] * pages.size + torch.arange(pages.size)).reshape(-1)
    return entries[entries < len(live)]


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    pages: Pages | None = None,
) -> torch.Tensor:
    """Return (heads * d,) outputs in the dtype of the inputs; one plain softmax per query head."""
    heads, dim = query.shape
    kv_heads = lengths.shape[0]
    group = heads // kv_heads
    out = torch.empty(heads, dim, dtype=query.dtype)
    for h in range(kv_heads):
        rows = read_rows(h, lengths, pages) + int(offsets[h])
        q = query[h * group : (h + 1) * group]
        out[h * group : (h + 1) * group] = torch.softmax(scale * q @ keys[rows].T, dim=-1) @ values[rows]
    return out.reshape(-1)


def bytes_moved(keys: torch.Tensor, lengths: torch.Tensor, pages: Pages | None = None) -> int:
    """Return the cache bytes that one call reads."""
    entries = sum(len(read_rows(h, lengths, pages)) for h in range(lengths.shape[0]))
    return 2 * entries * keys.shape[-1] * keys.element_size()


def bind(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    capacity: int,
    pages: Pages | None = None,
) -> Launch:
    """Bind attention of one rotated token.

    query (heads, d) float32; keys, values (rows, d); offsets (kv_heads,) int64; lengths (kv_heads,) int32, entries
    before this step's own; out (heads * d,) float32. capacity: most entries that all heads together will ever hold.
    """
    if query.dim() != 2 or keys.dim() != 2:
        raise ShapeError(f"query {tuple(query.shape)} must be (heads, d) and keys {tuple(keys.shape)} (rows, d)")
    heads, dim = query.shape
    kv_heads = lengths.shape[0]
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    require_shape("keys", keys, (keys.shape[0], dim))
    require_shape("values", values, tuple(keys.shape))
    require_shape("offsets", offsets, (kv_heads,))
    require_shape("lengths", lengths, (kv_heads,))
    require_shape("out", out, (heads * dim,))
    if pages is not None:
        require_shape("page counts", pages.counts, (kv_heads,))
        require_shape("chosen pages", pages.chosen, (kv_heads, pages.chosen.shape[-1]))
        if SPLIT % pages.size:
            raise ShapeError(f"pages of {pages.size} entries; give a divisor of {SPLIT}")
    return backend("ragged", keys).bind(query, keys, values, offsets, lengths, out, scale, capacity, pages)
