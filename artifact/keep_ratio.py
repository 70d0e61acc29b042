"""Effective KV keep ratios: what a method reads of the cache over what a dense step reads, for the byte account.

A method that keeps whole entries has its ratio by construction. Others store masks, signs, statistics or page
summaries, and those are bytes a step reads, so they count.
"""

from __future__ import annotations

from math import ceil

from artifact.checks import count, in_range
from artifact.errors import UserError


def pruned_key_bytes(
    head_dim: int, kept: int, element_bytes: int = 2, *, mask: bool = True, signs: bool = False, statistics: int = 0
) -> int:
    """Bytes of one key vector of which `kept` of `head_dim` channels are stored (ThinK, SparK).

    A per-token mask costs one bit per channel, a sign one bit per pruned channel, each statistic for the recovery of
    pruned channels one element. With 26 of 128 channels, mask, signs and two statistics: 52 + 16 + 13 + 4 = 85 of 256.
    """
    count("head_dim", head_dim, 1)
    count("kept channels", kept, 0)
    count("element bytes", element_bytes, 1)
    count("statistics", statistics, 0)
    if kept > head_dim:
        raise UserError(f"kept channels is {kept} of {head_dim}; give at most {head_dim}")
    bits = (head_dim if mask else 0, head_dim - kept if signs else 0)
    return kept * element_bytes + sum(ceil(part / 8) for part in bits) + statistics * element_bytes


def channel_r_kv(key_bytes: float, value_bytes: float, head_dim: int, element_bytes: int = 2) -> float:
    """Effective keep ratio when every token stores a shortened key and value."""
    dense = count("head_dim", head_dim, 1) * count("element bytes", element_bytes, 1)
    in_range("key bytes", key_bytes, 0, dense)
    in_range("value bytes", value_bytes, 0, dense)
    return (key_bytes + value_bytes) / (2 * dense)


def headwise_r_kv(n_tokens: int, adaptive_share: float, adaptive_keep: float, consistent_tokens: int) -> float:
    """Effective keep ratio when a share of the heads keeps a ratio of its entries and the rest a fixed number (CateKV).

    At 128K tokens with 0.4 adaptive heads that keep everything and 2,048 tokens for the others: 0.409.
    """
    count("context", n_tokens, 1)
    count("consistent tokens", consistent_tokens, 1)
    if not 0 <= adaptive_share <= 1:
        raise UserError(f"share of adaptive heads is {adaptive_share}; give a number from 0 to 1")
    in_range("keep ratio of adaptive heads", adaptive_keep, 0, 1)
    fixed = min(consistent_tokens, n_tokens) / n_tokens
    return adaptive_share * adaptive_keep + (1 - adaptive_share) * fixed


def paged_r_kv(r_kv: float, page_tokens: int) -> float:
    """Effective keep ratio when every step reads a minimum and a maximum key per page to choose its pages (Quest)."""
    in_range("r_kv", r_kv, 0, 1)
    return min(1.0, r_kv + 1 / count("page tokens", page_tokens, 2))
