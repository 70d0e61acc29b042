"""Dense prefill in torch: fills a KV cache from token ids, layer by layer over the whole prompt.

Going layer by layer keeps one (n, hidden) activation and needs no causal mask between chunks; the MLP, and on a GPU
the other projections, run in row chunks. Beside the cache, memory grows with n x hidden alone: never with n x
intermediate, n x vocab or n x n. A prefix of the result is the prefill of the prefix, so one pass over the longest
context serves every shorter one. Queries of the tokens just before each requested length are kept for methods that
score the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from artifact.engine.cache import KVCache
from artifact.engine.models import Layer, Weights
from artifact.errors import UserError
from kernels.rope_append import normalise, rotate

MLP_ROWS = 1024
GPU_ROWS = 8192  # rows of q|k|v and of o at once on a GPU, where the float32 copies of 128K rows would take gigabytes
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]

# Called as observe(layer, site, x): x (rows, channels) is what the projection at `site` reads.
Observer = Callable[[int, str, torch.Tensor], None]
SITES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Prefill:
    """A filled cache, the final hidden state (n, hidden) and, per requested length, per layer, queries (heads, rows,
    d).
    """

    cache: KVCache
    hidden: torch.Tensor
    queries: dict[int, list[torch.Tensor]]


@torch.no_grad()  # not inference_mode: its tensors refuse to be written outside of it, and a cache keeps growing
def prefill(
    weights: Weights,
    tokens: torch.Tensor,
    capacity: int | None = None,
    query_lengths: Iterable[int] = (),
    rows: int = 64,
    observe: Observer | None = None,
    progress: Callable[[float], None] | None = None,
) -> Prefill:
    """Run the dense model over `tokens` (n,) int64 and return its cache.

    query_lengths: for each such length m <= n, keep the rotated queries of tokens m - rows .. m - 1.
    Raises UserError for an empty prompt, one longer than the model's window, the capacity or a query length.
    """
    shape = weights.shape
    count = int(tokens.shape[0])
    if not 1 <= count <= shape.window:
        raise UserError(
            f"a prompt of {count} tokens does not fit the model's window of {shape.window}; shorten the text"
        )
    capacity = count if capacity is None else capacity
    if capacity < count:
        raise UserError(f"a prompt of {count} tokens does not fit a capacity of {capacity}; allocate a larger cache")
    cache = KVCache.allocate(shape, capacity, str(weights.device), weights.dtype)
    positions = torch.arange(count, device=weights.device, dtype=torch.float32)
    angles = positions[:, None] * weights.inv_freq
    hidden = weights.embedding[tokens.to(weights.device)].float()
    kept: dict[int, list[torch.Tensor]] = {length: [] for length in query_lengths}
    if any(not 1 <= length <= count for length in kept):
        raise UserError(f"queries are asked for at {sorted(kept)} tokens of a prompt of {count}; shorten the contexts")
    for index, layer in enumerate(weights.layers):
        queries = _layer(weights, layer, index, hidden, angles, cache, observe)
        for length, per_layer in kept.items():
            per_layer.append(queries[:, max(0, length - rows) : length].float().contiguous())
        if progress is not None:
            progress((index + 1) / shape.layers)
    cache.set_tokens(count)
    return Prefill(cache, hidden, kept)


def logits(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Return (rows, V) float32 logits of (rows, hidden) final hidden states, as exact as those of a decode step."""
    return _norm(hidden, weights.final_norm, weights.eps) @ weights.head.float().T


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x.to(w.dtype), w, None if bias is None else bias.to(w.dtype)).float()


def _layer(
    weights: Weights,
    layer: Layer,
    index: int,
    hidden: torch.Tensor,
    angles: torch.Tensor,
    cache: KVCache,
    observe: Observer | None,
) -> torch.Tensor:
    """Advance `hidden` (n, H) in place through one layer; return the rotated queries (heads, n, d)."""
    shape = weights.shape
    count, dim = hidden.shape[0], shape.head_dim
    chunks = [slice(start, start + _rows(hidden)) for start in range(0, count, _rows(hidden))]
    queries = torch.empty(count, shape.heads, dim, dtype=weights.dtype, device=hidden.device).transpose(0, 1)
    for rows in chunks:
        normed = _norm(hidden[rows], layer.attention_norm, weights.eps)
        if observe is not None:
            observe(index, "qkv", normed)
        _project_attention(weights, layer, index, normed, angles[rows], rows, queries, cache)
    with _fused(queries):
        attended = functional.scaled_dot_product_attention(
            queries[None],
            cache.keys[index][None, :, :count],
            cache.values[index][None, :, :count],
            is_causal=True,
            enable_gqa=shape.group > 1,
        )[0]
    for rows in chunks:
        mixed = attended[:, rows].transpose(0, 1).reshape(-1, shape.heads * dim).float()
        if observe is not None:
            observe(index, "o", mixed)
        hidden[rows] += _linear(mixed, layer.o.w, layer.o.bias)
    for start in range(0, count, MLP_ROWS):
        part = hidden[start : start + MLP_ROWS]
        normed = _norm(part, layer.mlp_norm, weights.eps)
        gate, up = _linear(normed, layer.gate_up.w, layer.gate_up.bias).chunk(2, dim=-1)
        act = functional.silu(gate) * up
        if observe is not None:
            observe(index, "gate_up", normed)
            observe(index, "down", act)
        part += _linear(act, layer.down.w, layer.down.bias)
    return queries


def _project_attention(
    weights: Weights,
    layer: Layer,
    index: int,
    normed: torch.Tensor,
    angles: torch.Tensor,
    rows: slice,
    queries: torch.Tensor,
    cache: KVCache,
) -> None:
    """Write rotated queries, keys and values of some rows (m, H) to `queries` (heads, n, d) and the cache."""
    shape, dim, m = weights.shape, weights.shape.head_dim, normed.shape[0]
    widths = (shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim)
    q, k, v = _linear(normed, layer.qkv.w, layer.qkv.bias).split(widths, dim=-1)
    q = rotate(normalise(q.view(m, shape.heads, dim), layer.q_norm, weights.eps), angles[:, None])
    k = rotate(normalise(k.view(m, shape.kv_heads, dim), layer.k_norm, weights.eps), angles[:, None])
    end = rows.start + m
    queries[:, rows.start : end] = q.transpose(0, 1)
    cache.keys[index][:, rows.start : end] = k.transpose(0, 1)
    cache.values[index][:, rows.start : end] = v.view(m, shape.kv_heads, dim).transpose(0, 1)


def _rows(hidden: torch.Tensor) -> int:
    """Rows of one chunk of q|k|v and o: all on a CPU, whose products are fastest whole."""
    return GPU_ROWS if hidden.is_cuda else hidden.shape[0]


def _fused(queries: torch.Tensor) -> AbstractContextManager[None]:
    """Refuse the plain form of attention on a GPU: it would hold n x n numbers per head."""
    if queries.is_cuda and queries.dtype in (torch.float16, torch.bfloat16):
        return sdpa_kernel(FUSED)
    return nullcontext()
