"""A KV cache of which every vector of the prompt stores some channels only, with a dense tail behind it.

SparK keeps channels per token, ThinK per head; both leave the most recent tokens and everything decoded whole. Packed
parts are built per layer (`kernels.channels.Pruned`); what they store is what every step reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.step import Op
from artifact.errors import UserError
from artifact.kv.branch import Entries, LayerInputs
from artifact.kv.window import Window
from kernels import channels, rope_append
from kernels.channels import Pruned


@dataclass(frozen=True)
class PrunedCache:
    """layers: the packed part of each layer; keys, values (L, kv_heads, capacity, d) and lengths (L, kv_heads) int32
    of the tail; prompt_tokens: length of the prompt that was pruned; retained: entries of it that are still there.
    """

    layers: tuple[Pruned, ...]
    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    prompt_tokens: int
    retained: int

    @property
    def attended(self) -> torch.Tensor:
        return self.lengths

    @property
    def entry_bytes(self) -> int:
        return 2 * self.keys.shape[3] * self.keys.element_size()

    @property
    def fixed_bytes(self) -> float:
        return float(sum(layer.stored_bytes() for layer in self.layers))

    @property
    def per_step(self) -> bool:
        return False

    def room(self) -> int:
        """Tokens that may still be appended."""
        return self.keys.shape[2] - int(self.lengths.max())

    def storage_bytes(self) -> int:
        """Bytes allocated: the packed part with masks, signs and statistics, and the tail with its room."""
        return int(self.fixed_bytes) + 2 * self.keys.numel() * self.keys.element_size()

    def key_bytes(self) -> float:
        """Bytes stored per pruned key, on average."""
        return sum(layer.key_bytes() for layer in self.layers) / len(self.layers)

    def sector_bytes(self) -> int:
        """Bytes of the 32-byte sectors that a step's reading of the packed part touches on a GPU."""
        return sum(layer.sector_bytes() for layer in self.layers)

    def attention(self, index: int, inputs: LayerInputs) -> list[Op]:
        """Rotation and append to the tail, then attention over packed part and tail in one launch."""
        i = inputs
        kv_heads, capacity, dim = self.keys[index].shape
        offsets = torch.arange(kv_heads, device=self.keys.device) * capacity
        flat = (self.keys[index].view(-1, dim), self.values[index].view(-1, dim), offsets, self.lengths[index])
        moved = rope_append.bind_rows(i.qkv, i.inv_freq, i.position, i.query, i.full, flat, i.q_norm, i.k_norm, i.eps)
        tail = (self.keys[index], self.values[index], self.lengths[index])
        return [
            Op("rope_append", moved),
            Op("attention", channels.bind(i.query, self.layers[index], tail, i.out, i.scale)),
        ]

    def entries(self, index: int, more: int = 0) -> Entries:
        """Keys and values of one layer as attention sees them: the packed part expanded, the tail behind it."""
        layer, own = self.layers[index], self.lengths[index] + more
        longest = int(own.max())
        keys = torch.cat((layer.keys_expanded(), self.keys[index][:, :longest]), 1)
        values = torch.cat((layer.values_expanded(), self.values[index][:, :longest]), 1)
        return Entries(keys, values, own + layer.kept.shape[1])

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put (kv_heads, m, d) whole entries behind the tail of one layer."""
        start = int(self.lengths[index, 0])
        self.keys[index][:, start : start + keys.shape[1]] = keys
        self.values[index][:, start : start + keys.shape[1]] = values
        self.lengths[index] += keys.shape[1]


def everything(full: KVCache) -> PackedCache:
    """The whole prompt as a packed cache, for pruning without eviction."""
    return Window().select(full, 1.0, 0)


def split_tail(source: PackedCache, recent: int, reserve: int) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (pruned tokens, tail keys, tail values, tail lengths): the last `recent` entries, room for `reserve` more.

    Raises UserError when heads differ in length or nothing is left to prune.
    """
    kept = int(source.lengths.max())
    if int(source.lengths.min()) != kept:
        raise UserError("channels are pruned on caches whose heads keep equal numbers of entries")
    if kept <= recent:
        raise UserError(f"{kept} entries are cached and the {recent} most recent stay whole; give a longer prompt")
    layers, kv_heads, _, dim = source.keys.shape
    tail = source.keys.new_empty(2, layers, kv_heads, recent + reserve, dim)
    tail[0, :, :, :recent] = source.keys[:, :, kept - recent : kept]
    tail[1, :, :, :recent] = source.values[:, :, kept - recent : kept]
    lengths = torch.full((layers, kv_heads), recent, dtype=torch.int32, device=source.keys.device)
    return kept - recent, tail[0], tail[1], lengths


def query_strength(observed: torch.Tensor, rows: int, kv_heads: int, power: int) -> torch.Tensor:
    """Return (kv_heads, d): per channel, the mean over the last `rows` queries and a group's heads of |q|^power."""
    heads, available, dim = observed.shape
    asked = observed[:, -min(rows, available) :].float().abs().pow(power)
    return asked.reshape(kv_heads, heads // kv_heads, -1, dim).mean((1, 2))


def check_layers(queries: Sequence[torch.Tensor], layers: int) -> None:
    """UserError unless there are observation queries of every layer."""
    if len(queries) != layers:
        raise UserError(f"there are queries of {len(queries)} layers for a cache of {layers}")
