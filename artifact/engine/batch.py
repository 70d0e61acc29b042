"""The decode step of a batch: every weight is read once for all sequences, every sequence reads its own cache.

    embed each -> L x (qkv, attention of each, o, gate|up, down) -> head -> next position of each

A sparse projection reads the union of the channels that its sequences activate (crossover, section 3.3), and every
sequence uses its own. Lengths, positions and caches are those of the sequences and may differ; a step moves all of them
on by one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact.engine.cache import KVCache
from artifact.engine.models import Layer, Matrix, Weights
from artifact.engine.step import Op, captured
from artifact.errors import UserError
from artifact.kv.branch import KVBranch, LayerInputs
from artifact.projection.thresholds import PROJECTIONS, Thresholds
from kernels import Launch, attention, batched_gemv, batched_sparse_gemv, in_order, silu_product, token
from kernels.norm import Norm
from kernels.selection import Selection

# Fused projections and their columns in the order of PROJECTIONS.
SITES = {"qkv": (0, 3), "o": (3, 4), "gate_up": (4, 6), "down": (6, 7)}


@dataclass(frozen=True)
class BatchCounted:
    """What a number of steps of the whole batch read: bytes per step (means), u_b the share of the projection weights
    that any sequence activated, r_p the mean share that one sequence activated, r_kv the share of cache bytes.
    """

    steps: int
    projection_bytes: float
    kv_bytes: float
    head_bytes: float
    u_b: float
    r_p: float
    r_kv: float


@dataclass(frozen=True)
class Member:
    """One sequence of a batch: its full cache, its token buffer (capacity,) int64 and, in a KV mode, what it reads."""

    cache: KVCache
    tokens: torch.Tensor
    packed: KVBranch | None = None


class BatchDecoder:
    """Several sequences decoded together in one mode.

    thresholds None reads every weight. Attention is a launch per sequence, in every mode. Raises UserError when only
    some sequences carry a packed cache, or one without stores no entries to attend to.
    """

    def __init__(
        self,
        weights: Weights,
        sequences: Sequence[Member],
        thresholds: Thresholds | None = None,
        greedy: bool = False,
    ) -> None:
        if not 1 <= len(sequences) <= batched_gemv.MOST:
            raise UserError(f"a batch of {len(sequences)} sequences; give 1 to {batched_gemv.MOST}")
        if len({one.packed is None for one in sequences}) != 1:
            raise UserError("some sequences of the batch have a selection and some have none; give all or none of them")
        if any(one.packed is None and not one.cache.stored for one in sequences):
            raise UserError("a full cache was released and no KV branch is given; there is nothing to attend to")
        if thresholds is not None and thresholds.values.shape[0] != weights.shape.layers:
            raise UserError(f"thresholds for {thresholds.values.shape[0]} layers, the model has {weights.shape.layers}")
        self.weights, self.sequences, self.thresholds, self.greedy = weights, tuple(sequences), thresholds, greedy
        shape, device, batch = weights.shape, weights.device, len(sequences)
        self._kept = torch.zeros(shape.layers, len(PROJECTIONS), dtype=torch.int32, device=device)
        # Per layer the (batch, segments) counts of the four fused projections, one after the other.
        self._own = torch.zeros(shape.layers, len(PROJECTIONS) * batch, dtype=torch.int32, device=device)
        self._kept_total = torch.zeros_like(self._kept, dtype=torch.int64)
        self._own_total = torch.zeros_like(self._own, dtype=torch.int64)
        size = (shape.layers, shape.kv_heads)
        self._entries = [torch.zeros(size, dtype=torch.int64, device=device) for _ in sequences]
        q_width = shape.heads * shape.head_dim

        def rows(width: int) -> torch.Tensor:
            return torch.zeros(batch, width, dtype=torch.float32, device=device)

        self.residual, self.mixed = rows(shape.hidden), rows(q_width)
        self.qkv = rows(q_width + 2 * shape.kv_heads * shape.head_dim)
        self.both, self.act, self.logits = rows(2 * shape.intermediate), rows(shape.intermediate), rows(shape.vocab)
        self._sites = self._selections()
        self.ops = self._build()
        self._launches = [op.launch for op in self.ops]
        self._run = in_order(self._launches)
        self._starts = [one.cache.tokens for one in sequences]

    def step(self) -> None:
        """Decode one token of every sequence."""
        self._run()

    def capture(self) -> None:
        """Capture the launches in a CUDA graph; the batch has made a step before, so that everything is compiled."""
        self._run = captured(self._launches)

    def check_room(self, steps: int) -> None:
        """Raise UserError unless every cache and token buffer holds `steps` more tokens."""
        for number, one in enumerate(self.sequences):
            places = one.tokens.shape[0] - int(self.greedy)
            room = (min(one.cache.capacity, places) if one.cache.stored else places) - one.cache.tokens
            if one.packed is not None:
                room = min(room, one.packed.room())
            if steps > room:
                raise UserError(f"{steps} decode steps asked for, sequence {number} has room for {room}")

    def reset_counts(self) -> None:
        """Start counting anew from the current positions."""
        for total in (self._kept_total, self._own_total, *self._entries):
            total.zero_()
        self._starts = [one.cache.tokens for one in self.sequences]

    def counted(self) -> BatchCounted:
        """Return what the steps since the last reset read."""
        steps = self.sequences[0].cache.tokens - self._starts[0]
        if steps < 1:
            raise RuntimeError("no step was counted since the last reset")
        shape, batch = self.weights.shape, len(self.sequences)
        item, kv_item = self.weights.embedding.element_size(), self.sequences[0].cache.keys.element_size()
        widths = torch.tensor([p.outputs for p in shape.projections], dtype=torch.float64)
        dense = float(shape.layers * shape.projection_params)
        u_b = r_p = 1.0
        if self.thresholds is not None:
            u_b = float((self._kept_total.cpu().double() * widths).sum()) / steps / dense
            own = torch.cat([self._own_of(self._own_total, site).sum(1) for site in SITES], dim=1)
            r_p = float((own.cpu().double() * widths).sum()) / steps / batch / dense
        entry = 2 * shape.head_dim * kv_item
        cached = 0.0
        for one, total in zip(self.sequences, self._entries, strict=True):
            per_entry, fixed = (entry, 0.0) if one.packed is None else (one.packed.entry_bytes, one.packed.fixed_bytes)
            cached += float(total.sum()) / steps * per_entry + fixed
        full = sum(start + (steps + 1) / 2 for start in self._starts) * shape.layers * shape.kv_heads * entry
        return BatchCounted(
            steps=steps,
            projection_bytes=u_b * dense * item,
            kv_bytes=cached,
            head_bytes=float(shape.head_params * item),
            u_b=u_b,
            r_p=r_p,
            r_kv=cached / full,
        )

    def _own_of(self, counts: torch.Tensor, site: str) -> torch.Tensor:
        """The (L, batch, segments) part of per-sequence counts that belongs to one fused projection."""
        first, end = SITES[site]
        batch = len(self.sequences)
        return counts[:, first * batch : end * batch].view(-1, batch, end - first)

    def _selections(self) -> list[dict[str, tuple[Selection, torch.Tensor]]]:
        """Per layer and fused projection, what is selected and where each sequence's own count goes."""
        if self.thresholds is None:
            return [{} for _ in self.weights.layers]
        shape = self.weights.shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        segments = {
            "qkv": (0, q, q + kv, q + 2 * kv),
            "o": (0, shape.hidden),
            "gate_up": (0, shape.intermediate, 2 * shape.intermediate),
            "down": (0, shape.hidden),
        }
        values = self.thresholds.values.to(self.weights.device)

        def site(layer: int, name: str) -> tuple[Selection, torch.Tensor]:
            first, end = SITES[name]
            limits = values[layer, first:end].contiguous()
            select = Selection(limits, segments[name], self._kept[layer, first:end])
            return select, self._own_of(self._own, name)[layer]

        return [{name: site(layer, name) for name in SITES} for layer in range(shape.layers)]

    def _build(self) -> list[Op]:
        weights, ops = self.weights, []
        for number, one in enumerate(self.sequences):
            embed = token.bind_embed(one.tokens, one.cache.position, weights.embedding, self.residual[number])
            ops.append(Op("embed", embed))
        for index, layer in enumerate(weights.layers):
            ops += self._layer(index, layer)
        ops.append(Op("head", self._head()))
        if self.greedy:
            ops += [
                Op("argmax", token.bind_argmax(self.logits[number], one.tokens, one.cache.position))
                for number, one in enumerate(self.sequences)
            ]
        return ops + [Op("advance", self._advance(number)) for number in range(len(self.sequences))] + self._tally()

    def _head(self) -> Launch:
        norm = Norm(self.weights.final_norm, self.weights.eps)
        return batched_gemv.bind(self.residual, self.weights.head, self.logits, norm=norm)

    def _layer(self, index: int, layer: Layer) -> list[Op]:
        eps, sites = self.weights.eps, self._sites[index]

        def project(site: str, matrix: Matrix, x: torch.Tensor, y: torch.Tensor, norm: Norm | None = None) -> Op:
            add = y is self.residual
            if site in sites:
                select, own = sites[site]
                return Op(site, batched_sparse_gemv.bind(x, matrix.w_in, y, select, own, matrix.bias, norm, add))
            return Op(site, batched_gemv.bind(x, matrix.w, y, matrix.bias, norm, add))

        return [
            project("qkv", layer.qkv, self.residual, self.qkv, Norm(layer.attention_norm, eps)),
            *(op for number in range(len(self.sequences)) for op in self._attention(index, layer, number)),
            project("o", layer.o, self.mixed, self.residual),
            project("gate_up", layer.gate_up, self.residual, self.both, Norm(layer.mlp_norm, eps)),
            Op("silu", silu_product.bind(self.both, self.act)),
            project("down", layer.down, self.act, self.residual),
        ]

    def _attention(self, index: int, layer: Layer, number: int) -> list[Op]:
        """Rotation, append and attention of one sequence over what it reads."""
        one, weights = self.sequences[number], self.weights
        full = (one.cache.keys[index], one.cache.values[index])
        scale = weights.shape.head_dim**-0.5
        qkv, out = self.qkv[number], self.mixed[number]
        place = (weights.inv_freq, one.cache.position)
        q_norm, k_norm, eps = layer.q_norm, layer.k_norm, weights.eps
        if one.packed is None:
            live = one.cache.lengths[index]
            step = attention.bind_step(qkv, *place, full, None, live, out, scale, q_norm, k_norm, eps)
            return [Op("attention", step)]
        query = torch.zeros_like(out).view(weights.shape.heads, weights.shape.head_dim)
        return one.packed.attention(index, LayerInputs(qkv, query, out, full, *place, scale, q_norm, k_norm, eps))

    def _advance(self, number: int) -> Launch:
        one = self.sequences[number]
        lengths = [one.cache.lengths] if one.packed is None else [one.cache.lengths, one.packed.lengths]
        attended = one.cache.lengths if one.packed is None else one.packed.attended
        kept = (self._kept, self._kept_total) if number == 0 and self.thresholds is not None else None
        return token.bind_advance(one.cache.position, lengths, (attended, self._entries[number]), kept)

    def _tally(self) -> list[Op]:
        """Add every sequence's own counts to their totals."""
        if self.thresholds is None:
            return []
        return [Op("tally", lambda: self._own_total.add_(self._own))]
