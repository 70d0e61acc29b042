"""The KV cache of one sequence: the full cache, which always keeps growing, and the packed cache that a KV method
reads instead.

Layout (L, kv_heads, capacity, d): kept per KV head, never per query head. `lengths` count the entries of every layer
and head on the device, so one list of launches serves every step; all live in int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from artifact.errors import UserError
from artifact.models import empty
from artifact.shapes import Shape


@dataclass(frozen=True)
class KVCache:
    """Full cache: keys and values (L, kv_heads, capacity, d), position (1,) tokens so far, lengths (L, kv_heads) the
    same number.
    """

    keys: torch.Tensor
    values: torch.Tensor
    position: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def allocate(cls, shape: Shape, capacity: int, device: str, dtype: torch.dtype) -> KVCache:
        """Allocate an empty cache of `capacity` tokens; unused slots hold whatever memory held and are never read."""
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        return cls(
            empty(size, dtype, device),
            empty(size, dtype, device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(shape.layers, shape.kv_heads, dtype=torch.int32, device=device),
        )

    @property
    def tokens(self) -> int:
        return int(self.position)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def set_tokens(self, tokens: int) -> None:
        """Declare that the first `tokens` entries are valid; a shorter prefix of a causal cache is the cache of the
        prefix.
        """
        if not 0 <= tokens <= self.capacity:
            raise UserError(f"a cache of {self.capacity} tokens cannot hold {tokens}; allocate a larger one")
        self.position.fill_(tokens)
        self.lengths.fill_(tokens)

    def share(self, tokens: int) -> KVCache:
        """Return a cache with counters of its own over the same storage: `tokens` entries, the rest of the capacity
        to append to.

        For timing on synthetic caches too large to copy: the slots past `tokens` are common to all sharers.
        """
        other = KVCache(self.keys, self.values, torch.zeros_like(self.position), torch.zeros_like(self.lengths))
        other.set_tokens(tokens)
        return other

    def fork(self, tokens: int, capacity: int) -> KVCache:
        """Copy the first `tokens` entries into a cache of `capacity` of its own: what one mode appends no other mode
        sees.
        """
        if not 0 <= tokens <= min(self.tokens, capacity):
            raise UserError(f"cannot fork {tokens} of {self.tokens} tokens into a capacity of {capacity}")
        layers, kv_heads, _, dim = self.keys.shape
        device = str(self.keys.device)
        size = (layers, kv_heads, capacity, dim)
        keys, values = empty(size, self.keys.dtype, device), empty(size, self.values.dtype, device)
        keys[:, :, :tokens] = self.keys[:, :, :tokens]
        values[:, :, :tokens] = self.values[:, :, :tokens]
        copy = KVCache(keys, values, torch.zeros_like(self.position), torch.zeros_like(self.lengths))
        copy.set_tokens(tokens)
        return copy


@dataclass(frozen=True)
class PackedCache:
    """What a KV method retained, contiguous per KV head: keys and values (L, kv_heads, capacity, d), lengths (L,
    kv_heads).

    `lengths` may differ per head (ragged). New entries are appended to every head as decoding goes on.
    prompt_tokens: length of the prompt that was selected from; the requested keep ratio refers to it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    prompt_tokens: int

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def keep_ratio(self) -> float:
        """Counted share of the prompt's entries that are retained, from the lengths themselves (before any append)."""
        return float(self.lengths.double().mean()) / self.prompt_tokens
