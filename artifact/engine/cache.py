"""The KV cache of one sequence: the full cache, which always keeps growing, and the packed cache that a KV method
reads instead.

Layout (L, kv_heads, capacity, d): kept per KV head, never per query head. `lengths` count the entries of every layer
and head on the device, so one list of launches serves every step; all live in int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from artifact.engine.step import Op
from artifact.errors import UserError
from artifact.kv.branch import Entries, LayerInputs
from artifact.shapes import Shape
from kernels import attention, rope_append
from kernels.memory import empty


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

    def released(self) -> KVCache:
        """Return a cache that counts tokens but stores none: for a branch that keeps all that it reads itself."""
        layers, kv_heads, _, dim = self.keys.shape
        none = self.keys.new_empty((layers, kv_heads, 0, dim))  # no view, which would keep the storage alive
        return KVCache(none, none, self.position.clone(), self.lengths.clone())

    @property
    def stored(self) -> bool:
        """Whether entries are kept at all."""
        return self.capacity > 0

    def entries(self, index: int, more: int = 0) -> Entries:
        """What dense attention of one layer reads, and `more` entries behind it."""
        return _entries(self.keys, self.values, self.lengths, index, more)

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
class Retained:
    """What a KV method retained of a prompt and reads whole at every step.

    keys and values (..., d); lengths (L, kv_heads) int32, which may differ per head and grow as decoding goes on;
    prompt_tokens: length of the prompt that was selected from; the requested keep ratio refers to it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    prompt_tokens: int

    @property
    def attended(self) -> torch.Tensor:
        return self.lengths

    @property
    def entry_bytes(self) -> int:
        return 2 * self.keys.shape[-1] * self.keys.element_size()

    @property
    def fixed_bytes(self) -> float:
        return 0.0

    @property
    def per_step(self) -> bool:
        return False

    def keep_ratio(self) -> float:
        """Counted share of the prompt's entries that are retained, from the lengths themselves (before any append)."""
        return float(self.lengths.double().mean()) / self.prompt_tokens


@dataclass(frozen=True)
class PackedCache(Retained):
    """Retained entries, contiguous per KV head: keys and values (L, kv_heads, capacity, d). New entries are appended to
    every head.
    """

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def room(self) -> int:
        """Tokens that may still be appended."""
        return self.capacity - int(self.lengths.max())

    def storage_bytes(self) -> int:
        """Bytes allocated, every head as long as the longest."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def attention(self, index: int, inputs: LayerInputs) -> list[Op]:
        """One launch: rotation, append to both caches and attention over this one; two where no full cache is kept."""
        i, live = inputs, self.lengths[index]
        keys, values = self.keys[index], self.values[index]
        place = (i.qkv, i.inv_freq, i.position)
        if i.full[0].shape[1]:
            own = (keys, values, live)
            step = attention.bind_step(*place, i.full, own, live, i.out, i.scale, i.q_norm, i.k_norm, i.eps)
            return [Op("attention", step)]
        kv_heads, capacity, dim = keys.shape
        offsets = torch.arange(kv_heads, device=keys.device) * capacity
        rows = (keys.view(-1, dim), values.view(-1, dim), offsets, live)
        moved = rope_append.bind_rows(*place, i.query, i.full, rows, i.q_norm, i.k_norm, i.eps)
        return [
            Op("rope_append", moved),
            Op("attention", attention.bind(i.query, keys, values, live, i.out, i.scale)),
        ]

    def entries(self, index: int, more: int = 0) -> Entries:
        """What attention of one layer reads, and `more` entries behind each head's length."""
        return _entries(self.keys, self.values, self.lengths, index, more)

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write (kv_heads, m, d) keys and values behind the entries of every head and advance its length."""
        count = keys.shape[1]
        for head, length in enumerate(self.lengths[index].tolist()):
            self.keys[index, head, length : length + count] = keys[head]
            self.values[index, head, length : length + count] = values[head]
        self.lengths[index] += count

    def fork(self) -> PackedCache:
        """Copy the entries into storage of its own: what one mode appends no other mode sees."""
        size, longest = tuple(self.keys.shape), int(self.lengths.max())
        keys, values = (empty(size, one.dtype, str(one.device)) for one in (self.keys, self.values))
        keys[:, :, :longest] = self.keys[:, :, :longest]
        values[:, :, :longest] = self.values[:, :, :longest]
        return PackedCache(keys, values, self.lengths.clone(), self.prompt_tokens)


def _entries(keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, index: int, more: int) -> Entries:
    own = lengths[index] + more
    longest = int(own.max())
    return Entries(keys[index][:, :longest], values[index][:, :longest], own)
