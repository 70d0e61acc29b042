"""SparK: every cached key keeps the channels that matter for it, and the rest is recovered from a statistic.

Section 3 of the paper. Saliency of channel c of token t is w = |q_c| |k_tc|, the query's strength taken over the last
`rows` prompt queries; a token keeps its T most salient channels. Pruned channels come back in attention as a constant,
as the mean of what was pruned of that token, or as draws from its distribution; values keep the channels of largest
magnitude. Works on the whole prompt or on what a token-evicting method left of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from artifact import checks
from artifact.engine.cache import PackedCache
from artifact.engine.pruned import PrunedCache, check_layers, query_strength, split_tail
from artifact.errors import UserError
from kernels.channels import Pruned, pack_bytes, pack_words
from kernels.memory import placed

Saliency = Literal["qk", "k2q"]
Recovery = Literal["none", "constant", "mean", "sample"]


@dataclass(frozen=True)
class SparK:
    """keep, value_keep: share of key and value channels stored. saliency: "qk" (the paper's |q||k|) or "k2q" (public
    code's k^2 |q|). recovery of pruned key channels; `constant` is its value without statistics (the paper's 0.01);
    signs: store a sign bit per pruned channel, so that magnitudes are recovered. rows: queries of the observation
    window; recent: last tokens that stay whole. group: channels compete within groups of this size (SparK-g). top_p:
    keep channels until they hold this share of a token's saliency, at least one (SparK-p).

    Sampling and top-p have no kernel: `simulated` is then true, the recovered cache is stored dense, and only its
    quality may be looked at.
    """

    keep: float = 0.5
    value_keep: float = 1.0
    saliency: Saliency = "qk"
    recovery: Recovery = "mean"
    signs: bool = True
    constant: float = 0.01
    rows: int = 32
    recent: int = 32
    group: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.in_range("share of key channels", self.keep, 0, 1)
        checks.in_range("share of value channels", self.value_keep, 0, 1)
        checks.count("rows", self.rows, 1)
        checks.count("recent tokens", self.recent, 1)
        for name, value, known in (
            ("saliency", self.saliency, ("qk", "k2q")),
            ("recovery", self.recovery, ("none", "constant", "mean", "sample")),
        ):
            if value not in known:
                raise UserError(f"{name} is {value!r}; give one of {', '.join(known)}")
        if self.top_p is not None:
            checks.in_range("top-p share of saliency", self.top_p, 0, 1)
        if self.signs and self.recovery in ("none", "constant"):
            raise UserError(f"sign bits belong to recovered magnitudes; recovery {self.recovery!r} stores none")

    @property
    def simulated(self) -> bool:
        """Whether only the quality of this variant can be had, from a dense cache of recovered vectors."""
        return self.recovery == "sample" or self.top_p is not None

    def kept_channels(self, dim: int) -> int:
        """Key channels T that every token stores: per group rounded half up, at least one each."""
        size = dim if self.group is None else checks.count("group", self.group, 1)
        if dim % size:
            raise UserError(f"groups of {size} channels do not divide a head of {dim}; give a divisor")
        return dim // size * max(1, math.floor(self.keep * size + 0.5))

    def compress(self, source: PackedCache, queries: Sequence[torch.Tensor], reserve: int) -> PrunedCache | PackedCache:
        """Prune the entries of `source`; queries: per layer (heads, >= rows, d), rotated, of the last prompt tokens.

        Returns packed storage, or for a simulated variant a dense cache of what it would recover. Raises UserError
        when heads differ in length or the queries are not those of every layer.
        """
        check_layers(queries, source.keys.shape[0])
        tokens, tail_keys, tail_values, lengths = split_tail(source, self.recent, reserve)
        kv_heads = source.keys.shape[1]
        layers, recovered = [], []
        for index, observed in enumerate(queries):
            strength = query_strength(observed, self.rows, kv_heads, 1).to(source.keys.device)
            keys, values = source.keys[index][:, :tokens], source.values[index][:, :tokens]
            bits = self.chosen(keys, strength)
            if self.simulated:
                recovered.append(self._recovered(keys, bits, index))
            else:
                layers.append(self._packed(keys, values, bits))
        if self.simulated:
            return _dense(source, torch.stack(recovered), tokens, reserve)
        retained = int(source.lengths.max())
        return PrunedCache(tuple(layers), tail_keys, tail_values, lengths, source.prompt_tokens, retained)

    def chosen(self, keys: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
        """Return (kv_heads, n, d) booleans of the key channels that are stored; equal saliencies go to the earlier
        channel. keys (kv_heads, n, d), strength (kv_heads, d).
        """
        size = keys.float().abs()
        weight = (size if self.saliency == "qk" else size.square()) * strength[:, None]
        if self.top_p is not None:
            order = torch.sort(weight, dim=-1, descending=True, stable=True)
            share = order.values.double().cumsum(-1) / order.values.double().sum(-1, keepdim=True).clamp(min=1e-300)
            before = torch.nn.functional.pad(share, (1, 0))[..., :-1]
            return torch.zeros_like(weight, dtype=torch.bool).scatter(-1, order.indices, before < self.top_p)
        dim = keys.shape[-1]
        width, groups = self.kept_channels(dim), 1 if self.group is None else dim // self.group
        return top_channels(weight.unflatten(-1, (groups, dim // groups)), width // groups).flatten(-2)

    def _packed(self, keys: torch.Tensor, values: torch.Tensor, bits: torch.Tensor) -> Pruned:
        dim = keys.shape[-1]
        width = self.kept_channels(dim)
        signs = fill = None
        pruned = keys[~bits].view(*keys.shape[:2], dim - width)
        if self.recovery == "mean" and width < dim:
            fill = (pruned.float().abs() if self.signs else pruned.float()).mean(-1).to(keys.dtype).contiguous()
            signs = pack_bytes(pruned < 0) if self.signs else None
        constant = self.constant if self.recovery == "constant" else 0.0
        kept = placed(keys[bits].view(*keys.shape[:2], width))
        if self.value_keep == 1.0:
            return Pruned(dim, kept, pack_words(bits), None, signs, fill, constant, placed(values))
        value_width = max(1, math.floor(self.value_keep * dim + 0.5))
        value_bits = top_channels(values.float().abs(), value_width)
        short = placed(values[value_bits].view(*values.shape[:2], value_width))
        return Pruned(dim, kept, pack_words(bits), None, signs, fill, constant, short, pack_words(value_bits))

    def _recovered(self, keys: torch.Tensor, bits: torch.Tensor, layer: int) -> torch.Tensor:
        """Keys with their pruned channels recovered as this variant says, dense."""
        size = keys.float().abs() if self.signs else keys.float()
        gone = ~bits
        count = gone.sum(-1, keepdim=True).clamp(min=1)
        mean = (size * gone).sum(-1, keepdim=True) / count
        if self.recovery == "sample":
            deviation = (((size - mean) * gone).square().sum(-1, keepdim=True) / count).sqrt()
            generator = torch.Generator().manual_seed(self.seed * 1009 + layer)
            noise = torch.randn(keys.shape, generator=generator).to(keys.device)
            value = mean + deviation * noise
        else:
            value = {"none": torch.zeros_like(mean), "constant": torch.full_like(mean, self.constant)}.get(
                self.recovery, mean
            ).expand_as(size)
        if self.signs:
            value = torch.where(keys < 0, -value, value)
        return torch.where(bits, keys.float(), value).to(keys.dtype)


def top_channels(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Return booleans like `weight` of the `count` largest entries along the last axis, ties to the earlier one."""
    least = weight.kthvalue(weight.shape[-1] - count + 1, dim=-1, keepdim=True).values
    over, equal = weight > least, weight == least
    room = count - over.sum(-1, keepdim=True)
    return over | (equal & (equal.cumsum(-1) <= room))


def _dense(source: PackedCache, recovered: torch.Tensor, tokens: int, reserve: int) -> PackedCache:
    """`source` with its first `tokens` keys replaced, room for `reserve` more."""
    retained = int(source.lengths.max())
    layers, kv_heads, _, dim = source.keys.shape
    keys = source.keys.new_empty(layers, kv_heads, retained + reserve, dim)
    values = torch.empty_like(keys)
    keys[:, :, :retained], values[:, :, :retained] = source.keys[:, :, :retained], source.values[:, :, :retained]
    keys[:, :, :tokens] = recovered
    return PackedCache(keys, values, source.lengths.clone(), source.prompt_tokens)
