"""A KV cache in which every head of every layer keeps its own number of entries, without padding.

All heads of all layers share one pair of (rows, d) tensors; head h of layer l owns the rows from offsets[l, h], as
many as it retained and may still be given. What is allocated is therefore what a method keeps: memory shrinks by the
same share as the reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact.engine.cache import KVCache, Retained
from artifact.engine.step import Op
from artifact.kv.branch import Entries, LayerInputs
from kernels import ragged, rope_append
from kernels.memory import empty


@dataclass(frozen=True)
class RaggedCache(Retained):
    """Entries as keys and values (rows, d); offsets (L, kv_heads) int64, capacities (L, kv_heads) on the host."""

    offsets: torch.Tensor
    capacities: torch.Tensor

    def room(self) -> int:
        """Tokens that may still be appended to every head."""
        return int((self.capacities - self.lengths.cpu()).min())

    def storage_bytes(self) -> int:
        """Bytes of the rows themselves, room for further tokens included, and of the bookkeeping."""
        counters = self.offsets.numel() * 8 + self.lengths.numel() * 4
        return 2 * self.keys.numel() * self.keys.element_size() + counters

    def capacity(self, index: int) -> int:
        """Most entries that the heads of one layer can hold together."""
        return int(self.capacities[index].sum())

    def append_op(self, index: int, i: LayerInputs) -> Op:
        """Rotation of the new token and its append to the rows of every head of one layer."""
        rows = (self.keys, self.values, self.offsets[index], self.lengths[index])
        launch = rope_append.bind_rows(i.qkv, i.inv_freq, i.position, i.query, i.full, rows, i.q_norm, i.k_norm, i.eps)
        return Op("rope_append", launch)

    def attention(self, index: int, inputs: LayerInputs) -> list[Op]:
        """Rotation and append, then one call over the heads of the layer, each over its own length."""
        i, capacity = inputs, self.capacity(index)
        offsets, lengths = self.offsets[index], self.lengths[index]
        launch = ragged.bind(i.query, self.keys, self.values, offsets, lengths, i.out, i.scale, capacity)
        return [self.append_op(index, i), Op("attention", launch)]

    def rows(self, index: int, head: int, more: int = 0) -> slice:
        """Rows that one head's entries lie in, with `more` behind them."""
        start = int(self.offsets[index, head])
        return slice(start, start + int(self.lengths[index, head]) + more)

    def entries(self, index: int, more: int = 0) -> Entries:
        """A padded copy of what attention of one layer reads, for tests and for scoring many tokens at once."""
        own = self.lengths[index] + more
        size = (own.shape[0], int(own.max()), self.keys.shape[1])
        keys, values = self.keys.new_zeros(size), self.values.new_zeros(size)
        for head, length in enumerate(own.tolist()):
            keys[head, :length] = self.keys[self.rows(index, head, more)]
            values[head, :length] = self.values[self.rows(index, head, more)]
        return Entries(keys, values, own)

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put (kv_heads, m, d) entries behind those of every head of one layer and advance its lengths."""
        count = keys.shape[1]
        for head in range(keys.shape[0]):
            stop = self.rows(index, head).stop
            self.keys[stop : stop + count] = keys[head]
            self.values[stop : stop + count] = values[head]
        self.lengths[index] += count

    def fork(self) -> RaggedCache:
        """Copy the entries into storage of its own: what one mode appends no other mode sees."""
        keys, values = (empty(tuple(one.shape), one.dtype, str(one.device)) for one in (self.keys, self.values))
        keys.copy_(self.keys)
        values.copy_(self.values)
        return dataclasses.replace(self, keys=keys, values=values, lengths=self.lengths.clone())


def pack_ragged(full: KVCache, indices: Sequence[Sequence[torch.Tensor]], reserve: int) -> RaggedCache:
    """Gather indices[layer][head] (kept,), positions in ascending order, with room for `reserve` more per head.

    The full cache is read and left as it is.
    """
    device = full.keys.device
    lengths = torch.tensor([[len(index) for index in layer] for layer in indices], dtype=torch.int32)
    capacities = lengths.long() + reserve
    ends = capacities.flatten().cumsum(0).view_as(capacities)
    offsets = ends - capacities
    size = (int(ends[-1, -1]), full.keys.shape[3])
    keys, values = empty(size, full.keys.dtype, str(device)), empty(size, full.values.dtype, str(device))
    for layer, heads in enumerate(indices):
        for head, index in enumerate(heads):
            rows = slice(int(offsets[layer, head]), int(offsets[layer, head]) + len(index))
            keys[rows] = full.keys[layer, head, index.to(device)]
            values[rows] = full.values[layer, head, index.to(device)]
    return RaggedCache(keys, values, lengths.to(device), full.tokens, offsets.to(device), capacities)
