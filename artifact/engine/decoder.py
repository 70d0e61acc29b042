"""The decode step: one code path for every mode, every profile, speed and quality.

    embed -> L x (qkv, attention, o, gate|up, down) -> head -> next position

Five launches a layer: norms ride on the projection that reads them, residual additions on o and down, rotation and
append on attention. Only where a library's attention is timed (`artifact.engine.attention_paths`) are they a launch of
their own.

A mode changes only what a step reads: a projection branch decides which weights of the seven projections are read, a
KV branch (`artifact.kv.branch`) brings the attention over its own storage. The full cache keeps growing in every mode,
so that a branch can be switched between steps, unless it was released to show a method's own memory. A `Decoder` is the
list of launches of one mode; what it really read is counted by the kernels and summed on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from artifact.engine.attention_paths import OWN, LibraryAttention, backend_name
from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.models import Layer, Weights
from artifact.engine.route import Route
from artifact.engine.step import Buffers, Op, captured
from artifact.errors import UserError
from artifact.kv.branch import KVBranch, LayerInputs
from artifact.projection.branch import Projection, Steps
from artifact.projection.dense import Dense
from kernels import Launch, attention, gemv, in_order, rope_append, token
from kernels.norm import Norm


@dataclass(frozen=True)
class Counted:
    """What a number of steps read, counted by the step itself.

    steps; projection, cache and head bytes per step (means); keep ratios: bytes read, metadata included, over the
    bytes that dense steps at the same positions read.
    """

    steps: int
    projection_bytes: float
    kv_bytes: float
    head_bytes: float
    r_p: float
    r_kv: float

    @property
    def step_bytes(self) -> float:
        return self.projection_bytes + self.kv_bytes + self.head_bytes


class Decoder:
    """One sequence decoded in one mode.

    tokens (capacity,) int64 holds the prompt and what follows: step() reads tokens[position]. With `greedy` it also
    writes the most likely next token to tokens[position + 1]. path: which attention implementation runs
    (`artifact.engine.attention_paths`). projection None reads every weight; packed None reads the full cache. A
    cache that stores nothing (`KVCache.released`) needs a KV branch.
    """

    def __init__(
        self,
        weights: Weights,
        cache: KVCache,
        tokens: torch.Tensor,
        projection: Projection | None = None,
        packed: KVBranch | None = None,
        greedy: bool = False,
        path: str = OWN,
    ) -> None:
        self.path = path
        self.weights, self.cache, self.tokens = weights, cache, tokens
        self.projection, self.packed, self.greedy = projection, packed, greedy
        shape, device = weights.shape, weights.device
        if packed is not None and packed.prompt_tokens > cache.tokens:
            raise UserError(
                f"the packed cache was selected from {packed.prompt_tokens} tokens, the full cache holds {cache.tokens}"
            )
        if packed is None and not cache.stored:
            raise UserError("the full cache was released and no KV branch is given; there is nothing to attend to")
        if path != OWN and packed is not None and not isinstance(packed, PackedCache):
            raise UserError(f"attention path {path!r} reads whole entries of equal heads; use {OWN!r} with this method")
        self._entries_total = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.int64, device=device)
        self._start = cache.tokens
        self.buffers = Buffers.allocate(shape, device)
        self.projections = (projection or Dense()).bind(weights, self.buffers)
        routed = self.projections.routed
        self._route = None if routed is None else Route(routed.table, tokens, cache.position)
        self._library = None if path == OWN else LibraryAttention(path)
        self.logits = self.buffers.logits
        self.ops = self._build(self.projections)
        self._base_ops = self.ops if routed is None else self._build(routed.base)
        self._run = {True: in_order(_launches(self.ops)), False: in_order(_launches(self._base_ops))}

    @property
    def attended(self) -> torch.Tensor:
        """Entries (L, kv_heads) that attention reads in this mode besides a step's own."""
        return self.cache.lengths if self.packed is None else self.packed.attended

    def attention_backend(self) -> str:
        """Return the attention implementation that runs in this mode, as probed now."""
        keys = self.packed.keys[0] if isinstance(self.packed, PackedCache) else self.cache.keys[0]
        return backend_name(self.path, self.buffers.query, keys, self.attended[0])

    def step(self) -> None:
        """Decode one token: read tokens[position], append to the cache, leave logits (V,) and advance."""
        self._run[self.takes_branch()]()

    def takes_branch(self) -> bool:
        """Whether the current token takes the projection branch: one look-up where a table routes, else always."""
        return self._route is None or self._route.taken()

    def next_ops(self) -> list[Op]:
        """The launches of the step that comes next."""
        return self.ops if self.takes_branch() else self._base_ops

    def working_set_bytes(self) -> float:
        """Return the bytes of caches and weights that steps of this mode choose from, shared weights counted as its
        own.
        """
        entries = float(self.attended.sum()) * self._entry_bytes()
        entries += 0.0 if self.packed is None else self.packed.fixed_bytes
        item = self.weights.embedding.element_size()
        shape = self.weights.shape
        return entries + (shape.layers * shape.projection_params + shape.head_params) * item

    def check_room(self, steps: int) -> None:
        """Raise UserError unless the caches and the token buffer hold `steps` more tokens."""
        places = self.tokens.shape[0] - int(self.greedy)  # the last greedy step writes the token after it
        room = (min(self.cache.capacity, places) if self.cache.stored else places) - self.cache.tokens
        if self.packed is not None:
            room = min(room, self.packed.room())
        if steps > room:
            raise UserError(
                f"{steps} decode steps asked for, the caches have room for {room}; allocate a larger capacity"
            )

    def capture(self) -> None:
        """Capture the launches in a CUDA graph, those of base tokens in one of their own.

        The decoder has made a step before, so that everything is compiled. Raises UserError without room for another.
        """
        if self._route is not None:
            self.check_room(1)
        paths = {True: self.ops} if self._route is None else {True: self.ops, False: self._base_ops}
        for taken, ops in paths.items():
            if self._route is not None:  # that step took one path alone
                self._run_and_undo(ops)
            self._run[taken] = captured(_launches(ops))

    def _run_and_undo(self, ops: list[Op]) -> None:
        """Run launches once, then put back every counter; what they wrote to the caches the next step overwrites.

        Not so the bounds of pages, which keep the largest of all: raises ValueError for such a branch.
        """
        if self.packed is not None and self.packed.per_step:
            raise ValueError("a step over pages cannot be undone; a routed decoder takes no such KV branch")
        state = [self.cache.position, self.cache.lengths, self._entries_total, self.tokens]
        state += [] if self.packed is None else [self.packed.lengths]
        state += [] if self.projections.counters is None else [self.projections.counters[1]]
        saved = [one.clone() for one in state]
        in_order(_launches(ops))()
        for one, before in zip(state, saved, strict=True):
            one.copy_(before)

    def reset_counts(self) -> None:
        """Start counting anew from the current position, which another decoder may have left."""
        if self._route is not None:
            self._route.forget()
        if self.projections.counters is not None:
            self.projections.counters[1].zero_()
        self._entries_total.zero_()
        self._start = self.cache.tokens

    def counted(self) -> Counted:
        """Return what the steps since the last reset read. Raises RuntimeError when a mode did not do what it says."""
        steps = self.cache.tokens - self._start
        if steps < 1:
            raise RuntimeError("no step was counted since the last reset")
        shape = self.weights.shape
        item = self.weights.embedding.element_size()
        dense = float(shape.layers * shape.projection_params * item)
        read = self.projections.bytes_read(steps)
        cached = float(self._entries_total.sum()) / steps * self._entry_bytes()
        cached += 0.0 if self.packed is None else self.packed.fixed_bytes
        # A dense step at position p reads p + 1 entries per layer and KV head.
        full = (self._start + (steps + 1) / 2) * shape.layers * shape.kv_heads
        return Counted(
            steps=steps,
            projection_bytes=read,
            kv_bytes=cached,
            head_bytes=float(shape.head_params * item),
            r_p=read / dense,
            r_kv=cached / (full * 2 * shape.head_dim * self.cache.keys.element_size()),
        )

    def _entry_bytes(self) -> int:
        """Bytes of one entry that `attended` counts."""
        dense = 2 * self.weights.shape.head_dim * self.cache.keys.element_size()
        return dense if self.packed is None else self.packed.entry_bytes

    def _build(self, projections: Steps) -> list[Op]:
        weights, b, cache = self.weights, self.buffers, self.cache
        ops = [Op("embed", token.bind_embed(self.tokens, cache.position, weights.embedding, b.residual))]
        for index, layer in enumerate(weights.layers):
            ops += projections.qkv(index, layer)
            ops += self._attention(index, layer)
            ops += projections.o(index, layer)
            ops += projections.mlp(index, layer)
        final = Norm(weights.final_norm, weights.eps)
        ops.append(Op("head", gemv.bind(b.residual, weights.head, b.logits, norm=final)))
        if self.greedy:
            ops.append(Op("argmax", token.bind_argmax(b.logits, self.tokens, cache.position)))
        lengths = [cache.lengths] if self.packed is None else [cache.lengths, self.packed.lengths]
        entries = (self.attended, self._entries_total)
        ops.append(Op("advance", token.bind_advance(cache.position, lengths, entries, projections.counters)))
        if self._route is not None and self._route.rides:
            ops.append(Op("route", self._route.launch))
        return ops

    def _attention(self, index: int, layer: Layer) -> list[Op]:
        weights, b, cache, packed = self.weights, self.buffers, self.cache, self.packed
        full = (cache.keys[index], cache.values[index])
        place = (weights.inv_freq, cache.position)
        q_norm, k_norm, eps = layer.q_norm, layer.k_norm, weights.eps
        scale, live = weights.shape.head_dim**-0.5, self.attended[index]
        if self._library is not None:
            own = (packed.keys[index], packed.values[index], live) if isinstance(packed, PackedCache) else None
            keys, values = full if own is None else own[:2]
            return [
                Op("rope_append", rope_append.bind(b.qkv, *place, b.query, full, own, q_norm, k_norm, eps)),
                Op("attention", self._library.bind(index, b.query, keys, values, live, b.mixed, scale)),
            ]
        if packed is not None:
            inputs = LayerInputs(b.qkv, b.query, b.mixed, full, *place, scale, q_norm, k_norm, eps)
            return packed.attention(index, inputs)
        step = attention.bind_step(b.qkv, *place, full, None, live, b.mixed, scale, q_norm, k_norm, eps)
        return [Op("attention", step)]


def _launches(ops: list[Op]) -> list[Launch]:
    return [op.launch for op in ops]
