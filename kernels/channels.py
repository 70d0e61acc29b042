"""Decode attention over pruned channels: a packed prompt that stores part of every vector, then a dense tail.

Per token of the packed part: the kept channels of its key in channel order, one mask bit per channel, and, where the
method recovers pruned channels, one magnitude `fill` per token and one sign bit per pruned channel. A key is expanded
in registers (CUDA) or in a scratch of one split (CPU) and never written back:

    k[c] = kept[rank of c among kept channels]      mask bit c is 1
    k[c] = +-fill[token], or `constant`             otherwise

With `channels` (ThinK) all tokens of a head keep the same channels; then the query is shortened instead and nothing is
expanded. Values are dense, or kept channels and a mask of their own, 0 elsewhere. Entries of the tail (the most recent
tokens and everything decoded) are whole. Bytes moved: everything stored of the packed part, 2 d s_kv per tail entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import Launch, ShapeError, backend, require_shape

WORD_BITS = 32
SECTOR_BYTES = 32

Tail = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # keys, values (kv_heads, capacity, d); lengths (kv_heads,) int32


@dataclass(frozen=True)
class Pruned:
    """One layer's packed part of n tokens; `dim` is the head dimension.

    kept (kv_heads, n, T); mask (kv_heads, n, words) int32 or None; channels (kv_heads, T) int32 in ascending order or
    None, exactly one of the two; signs (kv_heads, n, ceil((d - T) / 8)) uint8 or None, bit r of a token is 1 where its
    r-th pruned channel is negative; fill (kv_heads, n) in the dtype of `kept` or None; constant: value of pruned
    channels where there is no fill. values (kv_heads, n, d), or (kv_heads, n, Tv) with value_mask (kv_heads, n, words).
    """

    dim: int
    kept: torch.Tensor
    mask: torch.Tensor | None
    channels: torch.Tensor | None
    signs: torch.Tensor | None
    fill: torch.Tensor | None
    constant: float
    values: torch.Tensor
    value_mask: torch.Tensor | None = None

    def stored(self) -> dict[str, torch.Tensor]:
        """Every tensor that is stored and read, by name."""
        named = {
            "kept": self.kept, "mask": self.mask, "channels": self.channels, "signs": self.signs, "fill": self.fill,
            "values": self.values, "value_mask": self.value_mask,
        }  # fmt: skip
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def stored_bytes(self) -> int:
        """Bytes of all that is stored, masks, signs and statistics included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.stored().values())

    def key_bytes(self) -> float:
        """Bytes stored per key, on average over tokens and heads."""
        parts = [t for name, t in self.stored().items() if name not in ("values", "value_mask")]
        return sum(t.numel() * t.element_size() for t in parts) / (self.kept.shape[0] * self.kept.shape[1])

    def sector_bytes(self) -> int:
        """Bytes of the 32-byte sectors that reading everything once touches on a GPU: each head's rows are one run."""
        total = 0
        for tensor in self.stored().values():
            run = tensor[0].numel() * tensor.element_size()
            for head in range(tensor.shape[0]):
                first, last = head * run // SECTOR_BYTES, ((head + 1) * run - 1) // SECTOR_BYTES
                total += (last - first + 1) * SECTOR_BYTES
        return total

    def keys_expanded(self) -> torch.Tensor:
        """Return (kv_heads, n, d): the keys as attention sees them."""
        if self.channels is not None:
            wide = self.kept.new_zeros(*self.kept.shape[:2], self.dim)
            return wide.scatter(2, self.channels.long()[:, None].expand(-1, self.kept.shape[1], -1), self.kept)
        assert self.mask is not None
        bits = unpack_words(self.mask, self.dim)
        other = torch.full_like(bits, self.constant, dtype=self.kept.dtype)
        if self.fill is not None:
            other = self.fill[..., None].expand_as(other)
        if self.signs is not None:
            negative = torch.zeros_like(bits)
            negative[~bits] = unpack_bytes(self.signs, self.dim - self.kept.shape[2]).flatten()
            other = torch.where(negative, -other, other)
        return other.clone().masked_scatter(bits, self.kept)

    def values_expanded(self) -> torch.Tensor:
        """Return (kv_heads, n, d): the values as attention sees them."""
        if self.value_mask is None:
            return self.values
        bits = unpack_words(self.value_mask, self.dim)
        return self.values.new_zeros(bits.shape).masked_scatter(bits, self.values)


def pack_words(bits: torch.Tensor) -> torch.Tensor:
    """Return (..., ceil(d / 32)) int32 of (..., d) booleans; bit c % 32 of word c // 32 is channel c."""
    words = -(-bits.shape[-1] // WORD_BITS)
    padded = torch.nn.functional.pad(bits.long(), (0, words * WORD_BITS - bits.shape[-1]))
    weights = torch.ones(WORD_BITS, dtype=torch.int64, device=bits.device) << torch.arange(
        WORD_BITS, device=bits.device
    )
    value = (padded.view(*bits.shape[:-1], words, WORD_BITS) * weights).sum(-1)
    return torch.where(value >= 1 << 31, value - (1 << 32), value).int()


def unpack_words(words: torch.Tensor, dim: int) -> torch.Tensor:
    """Return (..., dim) booleans of `pack_words`."""
    shifts = torch.arange(WORD_BITS, device=words.device)
    return ((words.long()[..., None] >> shifts) & 1).flatten(-2)[..., :dim].bool()


def pack_bytes(bits: torch.Tensor) -> torch.Tensor:
    """Return (..., ceil(m / 8)) uint8 of (..., m) booleans; bit i % 8 of byte i // 8 is entry i."""
    size = -(-bits.shape[-1] // 8)
    padded = torch.nn.functional.pad(bits.int(), (0, size * 8 - bits.shape[-1]))
    weights = 1 << torch.arange(8, device=bits.device, dtype=torch.int32)
    return (padded.view(*bits.shape[:-1], size, 8) * weights).sum(-1).to(torch.uint8)


def unpack_bytes(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return (..., count) booleans of `pack_bytes`."""
    shifts = torch.arange(8, device=packed.device)
    return ((packed.int()[..., None] >> shifts) & 1).flatten(-2)[..., :count].bool()


def reference(query: torch.Tensor, packed: Pruned, tail: Tail, scale: float) -> torch.Tensor:
    """Return (heads * d,) in the dtype of `query`: plain attention over expanded vectors and the live tail."""
    keys, values, lengths = tail
    kv_heads = keys.shape[0]
    group = query.shape[0] // kv_heads
    old_keys, old_values = packed.keys_expanded(), packed.values_expanded()
    out = torch.empty_like(query)
    for h in range(kv_heads):
        live = int(lengths[h]) + 1
        k = torch.cat((old_keys[h], keys[h, :live])).to(query.dtype)
        v = torch.cat((old_values[h], values[h, :live])).to(query.dtype)
        q = query[h * group : (h + 1) * group]
        out[h * group : (h + 1) * group] = torch.softmax(scale * q @ k.T, -1) @ v
    return out.reshape(-1)


def bind(query: torch.Tensor, packed: Pruned, tail: Tail, out: torch.Tensor, scale: float) -> Launch:
    """Bind attention of one rotated token: query (heads, d) float32, out (heads * d,) float32.

    Raises ShapeError for tensors that do not belong together.
    """
    keys, values, lengths = tail
    kv_heads, capacity, dim = keys.shape
    heads = query.shape[0]
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    if dim != packed.dim or (packed.mask is None) == (packed.channels is None):
        raise ShapeError(f"a packed part of {packed.dim} channels with one kind of mask fits a tail of {dim} channels")
    tokens, width = packed.kept.shape[1:]
    words = -(-dim // WORD_BITS)
    require_shape("query", query, (heads, dim))
    require_shape("tail values", values, (kv_heads, capacity, dim))
    require_shape("tail lengths", lengths, (kv_heads,))
    require_shape("out", out, (heads * dim,))
    require_shape("kept", packed.kept, (kv_heads, tokens, width))
    own = {
        "mask": (kv_heads, tokens, words), "channels": (kv_heads, width), "fill": (kv_heads, tokens),
        "signs": (kv_heads, tokens, -(-(dim - width) // 8)), "value_mask": (kv_heads, tokens, words),
        "values": (kv_heads, tokens, dim if packed.value_mask is None else packed.values.shape[2]),
    }  # fmt: skip
    for name, tensor in packed.stored().items():
        if name in own:
            require_shape(name, tensor, own[name])
    return backend("channels", keys).bind(query, packed, tail, out, scale)
