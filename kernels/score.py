"""Attention scores of cached entries, as SnapKV takes them once after prefill (crossover, section 4.1).

    p[h, i, j] = softmax_j(scale q_h,i . k_j) over j <= n - rows + i      (fp32, the last `rows` prompt tokens)
    s[kv, j]   = mean or max over the query heads of kv of sum_i p[h, i, j],  then pooled along j with an odd width

Bytes moved: the keys once per query row block; done once per prompt, charged as selection cost and never to a step.
"""

from __future__ import annotations

import torch

from kernels import ShapeError, backend, require_shape

POOLS = ("none", "max", "avg")
AGGREGATES = ("mean", "max")


def reference(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, pool: str = "none", width: int = 1, aggregate: str = "mean"
) -> torch.Tensor:
    """Return (kv_heads, n) scores in the dtype of the inputs; queries (heads, rows, d), keys (kv_heads, n, d)."""
    heads, rows, _ = queries.shape
    kv_heads, tokens, _ = keys.shape
    group = heads // kv_heads
    logits = scale * queries @ keys.repeat_interleave(group, 0).transpose(1, 2)
    later = torch.arange(tokens)[None, :] > torch.arange(tokens - rows, tokens)[:, None]
    summed = torch.softmax(logits.masked_fill(later, float("-inf")), -1).sum(1).reshape(kv_heads, group, tokens)
    scores = summed.amax(1) if aggregate == "max" else summed.mean(1)
    return smooth(scores, pool, width)


def smooth(scores: torch.Tensor, pool: str, width: int) -> torch.Tensor:
    """Pool (kv_heads, n) scores along n, keeping n: 'max' or 'avg' over a centred odd window, or 'none'."""
    if pool == "none" or width == 1:
        return scores
    padded = scores[:, None, :]
    if pool == "max":
        return torch.nn.functional.max_pool1d(padded, width, stride=1, padding=width // 2)[:, 0]
    return torch.nn.functional.avg_pool1d(padded, width, stride=1, padding=width // 2, count_include_pad=False)[:, 0]


def snapkv(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, pool: str = "none", width: int = 1, aggregate: str = "mean"
) -> torch.Tensor:
    """Return pooled (kv_heads, n) float32 scores of every cached entry.

    queries (heads, rows, d) float32: rotated queries of the last `rows` prompt tokens; keys (kv_heads, n, d), rows <=
    n. Raises ShapeError for shapes that do not fit and ValueError for an unknown pool, aggregate or an even width.
    """
    if pool not in POOLS or aggregate not in AGGREGATES:
        raise ValueError(f"pool {pool!r} must be one of {POOLS} and aggregate {aggregate!r} one of {AGGREGATES}")
    if width < 1 or width % 2 == 0:
        raise ValueError(f"pooling width {width} must be odd and positive")
    heads, rows, dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    require_shape("keys", keys, (kv_heads, tokens, dim))
    if heads % kv_heads or not 1 <= rows <= tokens:
        raise ShapeError(f"queries {tuple(queries.shape)} do not fit keys {tuple(keys.shape)}")
    scores = backend("score", keys).snapkv(queries.contiguous(), keys, scale, aggregate)
    return smooth(scores, pool, width)
