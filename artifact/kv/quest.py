"""Quest: every step reads only the pages whose key bounds promise the highest scores for its query.

The whole cache stays in memory; smallest and largest key of every page of `page_tokens` entries lie beside it and are
read each step, and those bytes are counted. Also on a ragged cache: CateKV chooses pages on its adaptive heads and
reads its consistent heads whole (the combination of its Appendix B.2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from artifact import checks
from artifact.engine.cache import KVCache
from artifact.engine.ragged import RaggedCache, pack_ragged
from artifact.engine.step import Op
from artifact.errors import UserError
from artifact.kv.branch import Entries, LayerInputs
from artifact.kv.retain import budget
from kernels import pages, ragged
from kernels.memory import empty
from kernels.pages import Bounds
from kernels.ragged import SPLIT, Pages


@dataclass(frozen=True)
class Quest:
    """keep: share of the prompt's entries that the chosen pages may hold; page_tokens: entries per page."""

    keep: float = 0.3
    page_tokens: int = 16

    def __post_init__(self) -> None:
        checks.in_range("share of entries read", self.keep, 0, 1)
        if SPLIT % checks.count("page tokens", self.page_tokens, 2):
            raise UserError(f"page tokens is {self.page_tokens}; give a power of two up to {SPLIT}")

    def select(self, full: KVCache, reserve: int) -> PagedCache:
        """Page a copy of the whole prompt with room for `reserve` more tokens."""
        everything = torch.arange(full.tokens)
        layers, kv_heads = full.lengths.shape
        source = pack_ragged(full, [[everything] * kv_heads] * layers, reserve)
        return self.over(source, torch.ones(layers, kv_heads, dtype=torch.bool))

    def over(self, source: RaggedCache, paged: torch.Tensor) -> PagedCache:
        """Choose pages on the heads marked in paged (L, kv_heads) of a cache; the other heads are read whole."""
        count = max(1, math.ceil(budget(source.prompt_tokens, self.keep) / self.page_tokens))
        device = source.keys.device
        budgets = torch.where(paged.to(device), count, -1).int()
        per_head = -(-source.capacities // self.page_tokens)
        ends = per_head.flatten().cumsum(0).view_as(per_head)
        size = (int(ends[-1, -1]), source.keys.shape[1])
        lows, highs = (empty(size, source.keys.dtype, device) for _ in range(2))
        offsets = ends - per_head
        for (layer, head), first in _numbered(offsets):
            keys = source.keys[source.rows(layer, head)]
            for number, start in enumerate(range(0, keys.shape[0], self.page_tokens)):
                page = keys[start : start + self.page_tokens]
                lows[first + number], highs[first + number] = page.amin(0), page.amax(0)
        table = torch.zeros(*paged.shape, int(per_head.max()), dtype=torch.int32, device=device)
        counts, attended = (torch.zeros(paged.shape, dtype=torch.int32, device=device) for _ in range(2))
        return PagedCache(source, lows, highs, offsets.to(device), budgets, table, counts, attended, self.page_tokens)


@dataclass(frozen=True)
class PagedCache:
    """source: where the entries lie; lows, highs (pages, d) with offsets (L, kv_heads); budgets, counts, attended (L,
    kv_heads) int32; chosen (L, kv_heads, most) int32 and counts of the last step.
    """

    source: RaggedCache
    lows: torch.Tensor
    highs: torch.Tensor
    offsets: torch.Tensor
    budgets: torch.Tensor
    chosen: torch.Tensor
    counts: torch.Tensor
    attended: torch.Tensor
    size: int

    @property
    def prompt_tokens(self) -> int:
        return self.source.prompt_tokens

    @property
    def lengths(self) -> torch.Tensor:
        return self.source.lengths

    @property
    def entry_bytes(self) -> int:
        return self.source.entry_bytes

    @property
    def fixed_bytes(self) -> float:
        return 0.0

    @property
    def per_step(self) -> bool:
        return True

    def room(self) -> int:
        """Tokens that may still be appended to every head."""
        return self.source.room()

    def storage_bytes(self) -> int:
        """Bytes of the entries and of the page bounds: more than without the method, not fewer."""
        return self.source.storage_bytes() + 2 * self.lows.numel() * self.lows.element_size()

    def attention(self, index: int, inputs: LayerInputs) -> list[Op]:
        """Rotation and append, the choice of pages, attention over them."""
        i, source = inputs, self.source
        table = Pages(self.chosen[index], self.counts[index], self.size)
        bounds = Bounds(self.lows, self.highs, self.offsets[index])
        offsets, lengths = source.offsets[index], source.lengths[index]
        choose = pages.bind(
            i.query, source.keys, offsets, lengths, bounds, self.budgets[index], table, self.attended[index]
        )
        attend = ragged.bind(
            i.query, source.keys, source.values, offsets, lengths, i.out, i.scale, source.capacity(index), table
        )
        return [source.append_op(index, i), Op("choose", choose), Op("attention", attend)]

    def entries(self, index: int, more: int = 0) -> Entries:
        """What the last step read of one layer, in order; `more` is 1 right after its attention, the only use."""
        source = self.source
        table = Pages(self.chosen[index], self.counts[index], self.size)
        lengths = source.lengths[index] + (more - 1)
        taken = [ragged.read_rows(head, lengths, table) for head in range(lengths.shape[0])]
        own = torch.tensor([len(rows) for rows in taken], dtype=torch.int32, device=lengths.device)
        size = (len(taken), int(own.max()), source.keys.shape[1])
        keys, values = source.keys.new_zeros(size), source.values.new_zeros(size)
        for head, rows in enumerate(taken):
            at = rows.to(source.keys.device) + source.offsets[index, head]
            keys[head, : len(rows)], values[head, : len(rows)] = source.keys[at], source.values[at]
        return Entries(keys, values, own)

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Not defined: what is read follows from each token's query."""
        raise ValueError("pages are chosen for every query; decode the tokens step by step")


def _numbered(offsets: torch.Tensor) -> list[tuple[tuple[int, int], int]]:
    """((layer, head), first page) of every head."""
    return [((layer, head), first) for layer, row in enumerate(offsets.tolist()) for head, first in enumerate(row)]
