"""Many given tokens through one branch in one pass: what a row of decode steps computes, without the steps.

Token i of a block sees the retained entries of the prompt and the tokens of the block before it, exactly as if the
block had been decoded one token at a time (`tests/test_quality.py` holds both against each other). Activations are
float32 whatever the weights are, as in a decode step. Two uses: scoring given tokens under a branch, and continuing a
dense prefill from a prefix of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from artifact.cache import KVCache, PackedCache
from artifact.errors import UserError
from artifact.models import Layer, Matrix, Weights
from artifact.prefill import logits
from artifact.projection.thresholds import Thresholds
from kernels.rope_append import normalise, rotate
from kernels.selection import mask

ROWS = 512  # rows per pass: bounds the attention mask and the MLP activations
HEAD_ROWS = 128
LOGITS = 1 << 27  # attention logits that exist at once on a GPU: 0.5 GB


@dataclass(frozen=True)
class Block:
    """hidden (m, H) before the final norm; queries per layer (heads, rows, d) of the last rows; r_p: counted share of
    the projection bytes that the tokens read.
    """

    hidden: torch.Tensor
    queries: list[torch.Tensor]
    r_p: float


class _Counter:
    """Counts the weights that thresholded projections read."""

    def __init__(self) -> None:
        self.read = 0
        self.dense = 0

    def add(self, kept: int, inputs: int, outputs: int, rows: int) -> None:
        self.read += kept * outputs
        self.dense += rows * inputs * outputs


@torch.inference_mode()
def forward(
    weights: Weights,
    cache: KVCache,
    tokens: torch.Tensor,
    thresholds: Thresholds | None = None,
    packed: PackedCache | None = None,
    query_rows: int = 0,
) -> Block:
    """Run tokens (m,) that follow `cache` through a branch; neither cache is changed."""
    _check_room(weights, cache.tokens + tokens.shape[0])
    keys = cache if packed is None else packed
    counter = _Counter()
    hidden, queries, _ = _layers(weights, keys, cache.tokens, tokens, thresholds, counter, query_rows)
    return Block(hidden, queries, counter.read / counter.dense if thresholds is not None else 1.0)


@torch.inference_mode()
def extend(
    weights: Weights,
    cache: KVCache,
    tokens: torch.Tensor,
    query_rows: int = 0,
    thresholds: Thresholds | None = None,
    packed: PackedCache | None = None,
) -> Block:
    """Append tokens (m,) to `cache`; without a branch, `cache` is then the dense prefill of the whole.

    With a branch, the tokens are what decode steps would have made of them, and `packed` grows as well. Raises
    UserError when a cache has no room.
    """
    count = int(tokens.shape[0])
    _check_room(weights, cache.tokens + count)
    room = cache.capacity - cache.tokens
    if packed is not None:
        room = min(room, packed.capacity - int(packed.lengths.max()))
    if count > room:
        raise UserError(f"{count} tokens are to be appended, the cache has room for {room}; allocate a larger one")
    hidden: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    counter = _Counter()
    for start in range(0, count, ROWS):
        rows, begin = tokens[start : start + ROWS], cache.tokens
        seen = cache if packed is None else packed
        out, queries, appended = _layers(weights, seen, begin, rows, thresholds, counter, query_rows)
        end = begin + int(rows.shape[0])
        for layer, (k, v) in enumerate(appended):
            cache.keys[layer][:, begin:end] = k
            cache.values[layer][:, begin:end] = v
            if packed is not None:
                _append(packed, layer, k, v)
        cache.set_tokens(end)
        hidden.append(out)
        kept = [torch.cat(pair, 1)[:, -query_rows:] for pair in zip(kept, queries, strict=True)] if kept else queries
    return Block(torch.cat(hidden), kept, counter.read / counter.dense if thresholds is not None else 1.0)


def _append(packed: PackedCache, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write (kv_heads, m, d) keys and values behind the entries of every head and advance its length."""
    count = keys.shape[1]
    for head, length in enumerate(packed.lengths[layer].tolist()):
        packed.keys[layer, head, length : length + count] = keys[head]
        packed.values[layer, head, length : length + count] = values[head]
    packed.lengths[layer] += count


@torch.inference_mode()
def token_nll(weights: Weights, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return (m,) float64 negative log-likelihoods in nats of targets (m,) under (m, H) final hidden states."""
    parts = []
    for start in range(0, hidden.shape[0], HEAD_ROWS):
        scores = logits(weights, hidden[start : start + HEAD_ROWS])
        parts.append(functional.cross_entropy(scores, targets[start : start + HEAD_ROWS], reduction="none").double())
    return torch.cat(parts)


def _check_room(weights: Weights, tokens: int) -> None:
    if tokens > weights.shape.window:
        raise UserError(f"{tokens} tokens do not fit the model's window of {weights.shape.window}; shorten the prompt")


Appended = list[tuple[torch.Tensor, torch.Tensor]]


def _layers(
    weights: Weights,
    seen: KVCache | PackedCache,
    position: int,
    tokens: torch.Tensor,
    thresholds: Thresholds | None,
    counter: _Counter,
    query_rows: int,
) -> tuple[torch.Tensor, list[torch.Tensor], Appended]:
    """Return hidden (m, H), queries of the last rows and the new (k, v) of every layer."""
    count = int(tokens.shape[0])
    at = torch.arange(position, position + count, device=weights.device, dtype=torch.float32)
    angles = at[:, None] * weights.inv_freq
    hidden = weights.embedding[tokens.to(weights.device)].float()
    queries, appended = [], []
    for index, layer in enumerate(weights.layers):
        values = None if thresholds is None else thresholds.values[index]
        q, k, v = _layer(weights, layer, hidden, angles, _retained(seen, index), values, counter)
        if query_rows:
            queries.append(q[:, -query_rows:].float().contiguous())
        appended.append((k, v))
    return hidden, queries, appended


class Layerwise:
    """Single layers on tokens (m,) that follow `cache`: inputs[i] (m, H) is what layer i reads in a dense pass."""

    def __init__(self, weights: Weights, cache: KVCache, tokens: torch.Tensor) -> None:
        self._weights, self._cache = weights, cache
        count = int(tokens.shape[0])
        at = torch.arange(cache.tokens, cache.tokens + count, device=weights.device, dtype=torch.float32)
        self._angles = at[:, None] * weights.inv_freq
        self.inputs = [weights.embedding[tokens.to(weights.device)].float()]
        for index in range(weights.shape.layers - 1):
            self.inputs.append(self.output(index, None))

    @torch.inference_mode()
    def output(self, index: int, thresholds: torch.Tensor | None) -> torch.Tensor:
        """Return (m, H): the output of layer `index` on its dense input, with one threshold per projection (7,)."""
        hidden = self.inputs[index].clone()
        seen = _retained(self._cache, index)
        _layer(self._weights, self._weights.layers[index], hidden, self._angles, seen, thresholds, _Counter())
        return hidden


@dataclass(frozen=True)
class _Retained:
    """Entries of one layer that the block may read: keys, values (kv_heads, longest, d), lengths (kv_heads,)."""

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor


def _retained(seen: KVCache | PackedCache, index: int) -> _Retained:
    lengths = seen.lengths[index]
    longest = int(lengths.max())
    return _Retained(seen.keys[index][:, :longest], seen.values[index][:, :longest], lengths)


def _layer(
    weights: Weights,
    layer: Layer,
    hidden: torch.Tensor,
    angles: torch.Tensor,
    retained: _Retained,
    thresholds: torch.Tensor | None,
    counter: _Counter,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advance hidden (m, H) in place; return rotated queries (heads, m, d) and new keys and values (kv_heads, m, d)."""
    shape, eps = weights.shape, weights.eps
    count, dim = hidden.shape[0], shape.head_dim
    q_width, kv_width = shape.heads * dim, shape.kv_heads * dim

    def project(x: torch.Tensor, matrix: Matrix, widths: tuple[int, ...], first: int) -> torch.Tensor:
        own = None if thresholds is None else thresholds[first : first + len(widths)].tolist()
        return _project(x, matrix, widths, own, counter)

    qkv = project(_norm(hidden, layer.attention_norm, eps), layer.qkv, (q_width, kv_width, kv_width), 0)
    q, k, v = qkv.split((q_width, kv_width, kv_width), dim=-1)
    q = rotate(normalise(q.view(count, shape.heads, dim), layer.q_norm, eps), angles[:, None])
    k = rotate(normalise(k.view(count, shape.kv_heads, dim), layer.k_norm, eps), angles[:, None])
    queries, keys = q.transpose(0, 1).to(weights.dtype), k.transpose(0, 1).to(weights.dtype)
    values = v.view(count, shape.kv_heads, dim).transpose(0, 1).to(weights.dtype)
    mixed = _attend(queries, keys, values, retained).transpose(0, 1).reshape(count, q_width).float()
    hidden += project(mixed, layer.o, (shape.hidden,), 3)
    normed = _norm(hidden, layer.mlp_norm, eps)
    gate, up = project(normed, layer.gate_up, (shape.intermediate, shape.intermediate), 4).chunk(2, dim=-1)
    hidden += project(functional.silu(gate) * up, layer.down, (shape.hidden,), 6)
    return queries, keys, values


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, retained: _Retained) -> torch.Tensor:
    """Return (heads, m, d): attention over the retained entries of each head and the block's own past."""
    if queries.is_cuda:
        return _attend_by_head(queries, keys, values, retained)
    heads, count, _ = queries.shape
    kv_heads, longest, _ = retained.keys.shape
    past = torch.arange(longest, device=queries.device)[None] < retained.lengths[:, None]
    own = torch.ones(count, count, dtype=torch.bool, device=queries.device).tril()
    visible = torch.cat((past[:, None].expand(-1, count, -1), own.expand(kv_heads, -1, -1)), -1)
    return functional.scaled_dot_product_attention(
        queries[None],
        torch.cat((retained.keys, keys), 1)[None],
        torch.cat((retained.values, values), 1)[None],
        attn_mask=visible.repeat_interleave(heads // kv_heads, 0)[None],
        enable_gqa=heads > kv_heads,
    )[0]


def _attend_by_head(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, retained: _Retained
) -> torch.Tensor:
    """The same in float32, one KV head and at most LOGITS logits at a time: no fused form takes a mask over groups."""
    heads, count, dim = queries.shape
    kv_heads = keys.shape[0]
    grouped = queries.view(kv_heads, heads // kv_heads, count, dim)
    out = torch.empty(grouped.shape, dtype=torch.float32, device=queries.device)
    future = torch.ones(count, count, dtype=torch.bool, device=queries.device).triu(1)
    for head, length in enumerate(retained.lengths.tolist()):
        seen = torch.cat((retained.keys[head, :length], keys[head])).float()
        mixed = torch.cat((retained.values[head, :length], values[head])).float()
        rows = max(1, LOGITS // (grouped.shape[1] * seen.shape[0]))
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            scores = grouped[head, :, part].float() @ seen.T * dim**-0.5
            scores[..., length:].masked_fill_(future[part], float("-inf"))
            out[head, :, part] = scores.softmax(-1) @ mixed
    return out.view(heads, count, dim)


def _project(
    x: torch.Tensor, matrix: Matrix, widths: tuple[int, ...], thresholds: list[float] | None, counter: _Counter
) -> torch.Tensor:
    """Return (m, N): each column segment reads the channels above its own threshold."""
    w, bias = matrix.w.float(), matrix.bias
    if thresholds is None:
        return functional.linear(x, w, bias)
    parts, start = [], 0
    while start < len(widths):
        # Segments with one threshold are one product: q, k and v mostly, gate and up always.
        stop = start + 1
        while stop < len(widths) and thresholds[stop] == thresholds[start]:
            stop += 1
        low, high = sum(widths[:start]), sum(widths[:stop])
        read = mask(x, thresholds[start])
        counter.add(int(read.sum()), x.shape[1], high - low, x.shape[0])
        kept = torch.where(read, x, torch.zeros_like(x))
        parts.append(functional.linear(kept, w[low:high], None if bias is None else bias[low:high]))
        start = stop
    return torch.cat(parts, -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
