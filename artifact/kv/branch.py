"""What a KV method brings to a decode step: its own storage, attention over it, and the bytes that both come to.

The decoder knows no method. It asks a branch for the launches of one layer's attention, moves the branch's lengths on
at the end of a step, and multiplies the entries that the step counted by the bytes of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from artifact.engine.step import Op


@dataclass(frozen=True)
class LayerInputs:
    """What one layer's attention works on: qkv ((heads + 2 kv_heads) d,) as projected, query (heads, d) scratch for
    rotated queries, out (heads d,), all float32; full: keys and values (kv_heads, capacity, d) of the full cache, of
    capacity 0 where none is kept; position (1,) int32.
    """

    qkv: torch.Tensor
    query: torch.Tensor
    out: torch.Tensor
    full: tuple[torch.Tensor, torch.Tensor]
    inv_freq: torch.Tensor
    position: torch.Tensor
    scale: float
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


@dataclass(frozen=True)
class Entries:
    """What attention of one layer reads, as plain numbers: keys and values (kv_heads, longest, d), lengths (kv_heads,).

    Slots past a head's length may hold anything.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor


class KVBranch(Protocol):
    """A KV method's storage of one sequence.

    prompt_tokens: length of the prompt that was selected from. lengths (L, kv_heads) int32 grow by one a step.
    attended (L, kv_heads) int32: entries a step reads, less its own one; `lengths` itself, or what the branch's own
    launches write each step. entry_bytes: bytes of one such entry; fixed_bytes: what every step reads besides.
    per_step: which entries are read depends on the step's query, so that only decode steps compute the method.
    """

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def lengths(self) -> torch.Tensor: ...

    @property
    def attended(self) -> torch.Tensor: ...

    @property
    def entry_bytes(self) -> int: ...

    @property
    def fixed_bytes(self) -> float: ...

    @property
    def per_step(self) -> bool: ...

    def room(self) -> int:
        """Tokens that may still be appended."""
        ...

    def storage_bytes(self) -> int:
        """Bytes allocated for the prompt and everything that may follow."""
        ...

    def attention(self, index: int, inputs: LayerInputs) -> list[Op]:
        """Launches of one layer: rotation and append where they are not part of attention, then attention."""
        ...

    def entries(self, index: int, more: int = 0) -> Entries:
        """What attention of one layer reads now, and `more` entries behind each head's length."""
        ...

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put (kv_heads, m, d) entries behind those of every head of one layer and advance its lengths."""
        ...
