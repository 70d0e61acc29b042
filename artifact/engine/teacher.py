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

from artifact.engine.cache import KVCache
from artifact.engine.models import Layer, Weights
from artifact.engine.prefill import logits
from artifact.errors import UserError
from artifact.kv.branch import Entries, KVBranch
from artifact.projection.branch import Projection, Rows
from artifact.projection.dense import Dense, DenseRows
from artifact.projection.thresholds import ThresholdedRows
from kernels.rope_append import normalise, rotate

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


@torch.inference_mode()
def forward(
    weights: Weights,
    cache: KVCache,
    tokens: torch.Tensor,
    projection: Projection | None = None,
    packed: KVBranch | None = None,
    query_rows: int = 0,
) -> Block:
    """Run tokens (m,) that follow `cache` through a branch; neither cache is changed."""
    _check_room(weights, cache.tokens + tokens.shape[0])
    _check_kind(packed)
    keys = cache if packed is None else packed
    rows = (projection or Dense()).rows(weights)
    hidden, queries, _ = _layers(weights, keys, cache.tokens, tokens, rows, query_rows)
    return Block(hidden, queries, rows.r_p)


@torch.inference_mode()
def extend(
    weights: Weights,
    cache: KVCache,
    tokens: torch.Tensor,
    query_rows: int = 0,
    projection: Projection | None = None,
    packed: KVBranch | None = None,
) -> Block:
    """Append tokens (m,) to `cache`; without a branch, `cache` is then the dense prefill of the whole.

    With a branch, the tokens are what decode steps would have made of them, and `packed` grows as well. Raises
    UserError when a cache has no room.
    """
    count = int(tokens.shape[0])
    _check_room(weights, cache.tokens + count)
    _check_kind(packed)
    room = cache.capacity - cache.tokens
    if packed is not None:
        room = min(room, packed.room())
    if count > room:
        raise UserError(f"{count} tokens are to be appended, the cache has room for {room}; allocate a larger one")
    hidden: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    rows = (projection or Dense()).rows(weights)
    for start in range(0, count, ROWS):
        given, begin = tokens[start : start + ROWS], cache.tokens
        seen = cache if packed is None else packed
        out, queries, appended = _layers(weights, seen, begin, given, rows, query_rows)
        end = begin + int(given.shape[0])
        for layer, (k, v) in enumerate(appended):
            cache.keys[layer][:, begin:end] = k
            cache.values[layer][:, begin:end] = v
            if packed is not None:
                packed.append(layer, k, v)
        cache.set_tokens(end)
        hidden.append(out)
        kept = [torch.cat(pair, 1)[:, -query_rows:] for pair in zip(kept, queries, strict=True)] if kept else queries
    return Block(torch.cat(hidden), kept, rows.r_p)


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


def _check_kind(packed: KVBranch | None) -> None:
    if packed is not None and packed.per_step:
        raise ValueError("this KV method chooses its entries for every query; decode the tokens step by step")


Appended = list[tuple[torch.Tensor, torch.Tensor]]


def _layers(
    weights: Weights,
    seen: KVCache | KVBranch,
    position: int,
    tokens: torch.Tensor,
    rows: Rows,
    query_rows: int,
) -> tuple[torch.Tensor, list[torch.Tensor], Appended]:
    """Return hidden (m, H), queries of the last rows and the new (k, v) of every layer."""
    count = int(tokens.shape[0])
    at = torch.arange(position, position + count, device=weights.device, dtype=torch.float32)
    angles = at[:, None] * weights.inv_freq
    tokens = tokens.to(weights.device)
    hidden = weights.embedding[tokens].float()
    queries, appended = [], []
    for index, layer in enumerate(weights.layers):
        q, k, v = _layer(weights, layer, index, hidden, tokens, angles, seen.entries(index), rows)
        if query_rows:
            queries.append(q[:, -query_rows:].float().contiguous())
        appended.append((k, v))
    return hidden, queries, appended


class Layerwise:
    """Single layers on tokens (m,) that follow `cache`: inputs[i] (m, H) is what layer i reads in a dense pass."""

    def __init__(self, weights: Weights, cache: KVCache, tokens: torch.Tensor) -> None:
        self._weights, self._cache, self._tokens = weights, cache, tokens.to(weights.device)
        count = int(tokens.shape[0])
        at = torch.arange(cache.tokens, cache.tokens + count, device=weights.device, dtype=torch.float32)
        self._angles = at[:, None] * weights.inv_freq
        self._mixed: dict[tuple[int, tuple[float, ...] | None], torch.Tensor] = {}  # of one layer at a time
        self.inputs = [weights.embedding[self._tokens].float()]
        for index in range(weights.shape.layers - 1):
            self.inputs.append(self.output(index, None))

    @torch.inference_mode()
    def output(self, index: int, thresholds: torch.Tensor | None) -> torch.Tensor:
        """Return (m, H): the output of layer `index` on its dense input, with one threshold per projection (7,)."""
        weights, hidden = self._weights, self.inputs[index].clone()
        dense, limits = DenseRows(weights), {} if thresholds is None else {index: thresholds}
        rows: Rows = ThresholdedRows(weights, limits) if limits else dense
        # The thresholds of o and of the MLP change nothing before them: trials of those share an attention.
        key = (index, None if thresholds is None else tuple(thresholds[:3].tolist()))
        if key not in self._mixed:
            seen = self._cache.entries(index)
            self._mixed = {known: mixed for known, mixed in self._mixed.items() if known[0] == index}
            self._mixed[key] = _mix(weights, weights.layers[index], index, hidden, self._angles, seen, rows)[0]
        _finish(weights, weights.layers[index], index, hidden, self._mixed[key], self._tokens, rows)
        return hidden


def _layer(
    weights: Weights,
    layer: Layer,
    index: int,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    angles: torch.Tensor,
    retained: Entries,
    rows: Rows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advance hidden (m, H) in place; return rotated queries (heads, m, d) and new keys and values (kv_heads, m, d)."""
    mixed, queries, keys, values = _mix(weights, layer, index, hidden, angles, retained, rows)
    _finish(weights, layer, index, hidden, mixed, tokens, rows)
    return queries, keys, values


def _mix(
    weights: Weights,
    layer: Layer,
    index: int,
    hidden: torch.Tensor,
    angles: torch.Tensor,
    retained: Entries,
    rows: Rows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what attention mixes of hidden (m, H), (m, heads * d), with rotated queries, new keys and values."""
    shape, eps = weights.shape, weights.eps
    count, dim = hidden.shape[0], shape.head_dim
    q_width, kv_width = shape.heads * dim, shape.kv_heads * dim
    qkv = rows.qkv(index, layer, _norm(hidden, layer.attention_norm, eps))
    q, k, v = qkv.split((q_width, kv_width, kv_width), dim=-1)
    q = rotate(normalise(q.view(count, shape.heads, dim), layer.q_norm, eps), angles[:, None])
    k = rotate(normalise(k.view(count, shape.kv_heads, dim), layer.k_norm, eps), angles[:, None])
    queries, keys = q.transpose(0, 1).to(weights.dtype), k.transpose(0, 1).to(weights.dtype)
    values = v.view(count, shape.kv_heads, dim).transpose(0, 1).to(weights.dtype)
    mixed = _attend(queries, keys, values, retained).transpose(0, 1).reshape(count, q_width).float()
    return mixed, queries, keys, values


def _finish(
    weights: Weights,
    layer: Layer,
    index: int,
    hidden: torch.Tensor,
    mixed: torch.Tensor,
    tokens: torch.Tensor,
    rows: Rows,
) -> None:
    """Advance hidden (m, H) in place by the output projection of what attention mixed, and by the MLP."""
    hidden += rows.o(index, layer, mixed)
    hidden += rows.mlp(index, layer, _norm(hidden, layer.mlp_norm, weights.eps), tokens)


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, retained: Entries) -> torch.Tensor:
    """Return (heads, m, d): attention over the retained entries of each head and the block's own past."""
    if queries.is_cuda:
        return _attend_by_head(queries, keys, values, retained)
    heads, count, dim = queries.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    own, own_lse = _fused(queries, keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), causal=True)
    # All queries of a group see the same retained entries: they are rows of one head, and no mask is needed.
    rows = queries.reshape(kv_heads, group * count, dim)
    lengths = retained.lengths.tolist()
    alike = [range(kv_heads)] if len(set(lengths)) == 1 else [range(head, head + 1) for head in range(kv_heads)]
    parts = []
    for same in alike:
        picked, length = slice(same.start, same.stop), lengths[same.start]
        seen = retained.keys[picked, :length], retained.values[picked, :length]
        parts.append(_fused(rows[picked], *seen, causal=False))
    past = torch.cat([mixed for mixed, _ in parts]).view(heads, count, dim)
    past_lse = torch.cat([lse for _, lse in parts]).view(heads, count)
    return torch.lerp(own, past, torch.sigmoid(past_lse - own_lse)[..., None].to(own.dtype))


def _fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's fused CPU attention (heads, m, d) with its log-sum-exp (heads, m), by which parts are merged."""
    if not keys.shape[1]:
        return torch.zeros_like(queries), queries.new_full(queries.shape[:2], float("-inf"), dtype=torch.float32)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # scaled_dot_product_attention keeps the sum
    mixed, lse = fused(queries[None], keys[None], values[None], 0.0, causal)
    return mixed[0], lse[0]


def _attend_by_head(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, retained: Entries) -> torch.Tensor:
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


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
