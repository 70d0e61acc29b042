"""Rotary embedding and cache append on one thread: a thousand floats per layer."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import FASTMATH, array, optional
from kernels.rope_append import Packed, Rows


@numba.njit(fastmath=FASTMATH)
def _head(source, weight, eps, cos, sin, out):  # type: ignore[no-untyped-def]
    """Optionally normalise one head, rotate it by halves, write it to out."""
    dim = source.shape[0]
    half = dim // 2
    factor = np.float32(1)
    if weight.shape[0] > 0:
        squares = np.float32(0)
        for i in range(dim):
            squares += source[i] * source[i]
        factor = np.float32(1) / np.sqrt(squares / np.float32(dim) + eps)
    for i in range(half):
        a, b = source[i] * factor, source[i + half] * factor
        if weight.shape[0] > 0:
            a, b = a * weight[i], b * weight[i + half]
        out[i] = a * cos[i] - b * sin[i]
        out[i + half] = b * cos[i] + a * sin[i]


@numba.njit
def rope_append(  # type: ignore[no-untyped-def]
    qkv,
    inv_freq,
    scaling,
    position,
    query,
    keys,
    values,
    packed,
    packed_keys,
    packed_values,
    lengths,
    q_norm,
    k_norm,
    eps,
):
    """Rotate and append one token; query (heads, d) is written, `packed` says whether a packed cache takes it too."""
    heads, dim = query.shape
    kv_heads = keys.shape[0]
    where = position[0]
    cos = np.empty(dim // 2, dtype=np.float32)
    sin = np.empty(dim // 2, dtype=np.float32)
    for i in range(dim // 2):
        angle = np.float32(where) * inv_freq[i]
        cos[i] = np.float32(np.cos(angle)) * scaling
        sin[i] = np.float32(np.sin(angle)) * scaling
    for h in range(heads):
        _head(qkv[h * dim : (h + 1) * dim], q_norm, eps, cos, sin, query[h])
    for h in range(kv_heads):
        start = (heads + h) * dim
        _head(qkv[start : start + dim], k_norm, eps, cos, sin, keys[h, where])
        value = qkv[start + kv_heads * dim : start + (kv_heads + 1) * dim]
        values[h, where] = value
        if packed:
            packed_keys[h, lengths[h]] = keys[h, where]
            packed_values[h, lengths[h]] = value


@numba.njit(cache=True)
def _alone(  # type: ignore[no-untyped-def]
    qkv,
    inv_freq,
    scaling,
    position,
    query,
    keys,
    values,
    packed,
    packed_keys,
    packed_values,
    lengths,
    q_norm,
    k_norm,
    eps,
):
    rope_append(
        qkv, inv_freq, scaling, position, query, keys, values, packed, packed_keys, packed_values, lengths, q_norm,
        k_norm, eps,
    )  # fmt: skip


@numba.njit(cache=True)
def _to_rows(  # type: ignore[no-untyped-def]
    qkv, inv_freq, position, query, keys, values, row_keys, row_values, offsets, lengths, q_norm, k_norm, eps
):
    """Rotate one token and append it to row offsets[h] + lengths[h], and to the full cache where one is stored."""
    heads, dim = query.shape
    kv_heads = lengths.shape[0]
    where = position[0]
    cos = np.empty(dim // 2, dtype=np.float32)
    sin = np.empty(dim // 2, dtype=np.float32)
    for i in range(dim // 2):
        angle = np.float32(where) * inv_freq[i]
        cos[i], sin[i] = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    for h in range(heads):
        _head(qkv[h * dim : (h + 1) * dim], q_norm, eps, cos, sin, query[h])
    for h in range(kv_heads):
        start, row = (heads + h) * dim, offsets[h] + lengths[h]
        _head(qkv[start : start + dim], k_norm, eps, cos, sin, row_keys[row])
        row_values[row] = qkv[start + kv_heads * dim : start + (kv_heads + 1) * dim]
        if keys.shape[1] > 0:
            keys[h, where] = row_keys[row]
            values[h, where] = row_values[row]


def bind_rows(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    query: torch.Tensor,
    full: tuple[torch.Tensor, torch.Tensor],
    rows: Rows,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> Launch:
    """Bind rotation and append to rows; shapes are checked by `kernels.rope_append.bind_rows`."""
    return functools.partial(
        _to_rows,
        array("qkv", qkv),
        array("inv_freq", inv_freq),
        array("position", position, torch.int32),
        array("query", query),
        array("keys", full[0]),
        array("values", full[1]),
        array("row keys", rows[0]),
        array("row values", rows[1]),
        array("offsets", rows[2], torch.int64),
        array("lengths", rows[3], torch.int32),
        optional("q_norm", q_norm),
        optional("k_norm", k_norm),
        np.float32(eps),
    )


def bind(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    query: torch.Tensor,
    full: tuple[torch.Tensor, torch.Tensor],
    packed: Packed | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    scaling: float,
) -> Launch:
    """Bind rotation and append; shapes are checked by `kernels.rope_append.bind`."""
    return functools.partial(
        _alone,
        *arguments(qkv, inv_freq, position, array("query", query), full, packed, q_norm, k_norm, eps, scaling),
    )


def arguments(
    qkv: torch.Tensor,
    inv_freq: torch.Tensor,
    position: torch.Tensor,
    query: np.ndarray,
    full: tuple[torch.Tensor, torch.Tensor],
    packed: Packed | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    scaling: float,
) -> tuple[Any, ...]:
    """Return what `rope_append` takes, in its order."""
    keys, values = array("keys", full[0]), array("values", full[1])
    return (
        array("qkv", qkv),
        array("inv_freq", inv_freq),
        np.float32(scaling),
        array("position", position, torch.int32),
        query,
        keys,
        values,
        packed is not None,
        keys if packed is None else array("packed keys", packed[0]),
        values if packed is None else array("packed values", packed[1]),
        np.zeros(keys.shape[0], dtype=np.int32) if packed is None else array("lengths", packed[2], torch.int32),
        optional("q_norm", q_norm),
        optional("k_norm", k_norm),
        np.float32(eps),
    )
