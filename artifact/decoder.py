"""The decode step: one code path for every mode, every profile, speed and quality.

    embed -> L x (qkv, attention, o, gate|up, down) -> head -> next position

Five launches a layer: norms ride on the projection that reads them, residual additions on o and down, rotation and
append on attention. Only where a library's attention is timed (`artifact.attention_paths`) are they a launch of their
own.

A mode changes only what a step reads: `thresholds` decide which input channels of the seven projections are read, a
packed cache decides which entries attention reads. The full cache keeps growing in every mode, so a branch can be
switched between steps. A `Decoder` is the list of launches of one mode; what it really read is counted by the kernels
and summed on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from artifact.attention_paths import OWN, LibraryAttention, backend_name
from artifact.cache import KVCache, PackedCache
from artifact.errors import UserError
from artifact.models import Layer, Matrix, Weights
from artifact.projection.thresholds import PROJECTIONS, Thresholds
from kernels import Launch, attention, gate_up, gemv, rope_append, sparse_gemv, token
from kernels.norm import Norm
from kernels.selection import Selection


@dataclass(frozen=True)
class Counted:
    """What a number of steps read, counted by the step itself.

    steps; projection, cache and head bytes per step (means); keep ratios: bytes read over the bytes that dense steps
    at the same positions read.
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


@dataclass(frozen=True)
class Op:
    """One launch of a step; `name` is the kind of operation, for the time and bandwidth of each kind."""

    name: str
    launch: Launch


@dataclass(frozen=True)
class Buffers:
    """Activation vectors of one decoder, float32; `query` is written only ahead of a library's attention."""

    residual: torch.Tensor
    qkv: torch.Tensor
    query: torch.Tensor
    mixed: torch.Tensor
    act: torch.Tensor
    logits: torch.Tensor


class Decoder:
    """One sequence decoded in one mode.

    tokens (capacity,) int64 holds the prompt and what follows: step() reads tokens[position]. With `greedy` it also
    writes the most likely next token to tokens[position + 1]. path: which attention implementation runs
    (`artifact.attention_paths`). thresholds None reads every weight; packed None reads the full cache.
    """

    def __init__(
        self,
        weights: Weights,
        cache: KVCache,
        tokens: torch.Tensor,
        thresholds: Thresholds | None = None,
        packed: PackedCache | None = None,
        greedy: bool = False,
        path: str = OWN,
    ) -> None:
        self.path = path
        self.weights, self.cache, self.tokens = weights, cache, tokens
        self.thresholds, self.packed, self.greedy = thresholds, packed, greedy
        shape, device = weights.shape, weights.device
        if packed is not None and packed.prompt_tokens > cache.tokens:
            raise UserError(
                f"the packed cache was selected from {packed.prompt_tokens} tokens, the full cache holds {cache.tokens}"
            )
        if thresholds is not None and thresholds.values.shape[0] != shape.layers:
            raise UserError(
                f"thresholds for {thresholds.values.shape[0]} layers, the model has {shape.layers}; calibrate it"
            )
        self._kept = torch.zeros(shape.layers, len(PROJECTIONS), dtype=torch.int32, device=device)
        self._kept_total = torch.zeros(shape.layers, len(PROJECTIONS), dtype=torch.int64, device=device)
        self._entries_total = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.int64, device=device)
        self._start = cache.tokens
        self._selections = self._make_selections()
        self.buffers = _buffers(weights)
        self._library = None if path == OWN else LibraryAttention(path)
        self.logits = self.buffers.logits
        self.ops = self._build()
        self._launches = [op.launch for op in self.ops]
        self._replay: Callable[[], object] | None = None

    @property
    def attended(self) -> torch.Tensor:
        """Lengths (L, kv_heads) of the cache that attention reads in this mode."""
        return self.cache.lengths if self.packed is None else self.packed.lengths

    def attention_backend(self) -> str:
        """Return the attention implementation that runs in this mode, as probed now."""
        keys = (self.cache if self.packed is None else self.packed).keys[0]
        return backend_name(self.path, self.buffers.query, keys, self.attended[0])

    def step(self) -> None:
        """Decode one token: read tokens[position], append to the cache, leave logits (V,) and advance."""
        if self._replay is not None:
            self._replay()
            return
        for launch in self._launches:
            launch()

    def working_set_bytes(self) -> float:
        """Return the bytes of caches and weights that steps of this mode choose from, shared weights counted as its
        own.
        """
        keys = (self.cache if self.packed is None else self.packed).keys
        entries = float(self.attended.sum()) * 2 * keys.shape[-1] * keys.element_size()
        item = self.weights.embedding.element_size()
        shape = self.weights.shape
        return entries + (shape.layers * shape.projection_params + shape.head_params) * item

    def check_room(self, steps: int) -> None:
        """Raise UserError unless the caches and the token buffer hold `steps` more tokens."""
        places = self.tokens.shape[0] - int(self.greedy)  # the last greedy step writes the token after it
        room = min(self.cache.capacity, places) - self.cache.tokens
        if self.packed is not None:
            room = min(room, self.packed.capacity - int(self.packed.lengths.max()))
        if steps > room:
            raise UserError(
                f"{steps} decode steps asked for, the caches have room for {room}; allocate a larger capacity"
            )

    def capture(self) -> None:
        """Capture the launches in a CUDA graph; the launches have run once before, so that everything is compiled."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in self._launches:
                launch()
        self._replay = graph.replay

    def reset_counts(self) -> None:
        """Start counting anew from the current position."""
        self._kept_total.zero_()
        self._entries_total.zero_()
        self._start = self.cache.tokens

    def counted(self) -> Counted:
        """Return what the steps since the last reset read. Raises RuntimeError when a mode did not do what it says."""
        steps = self.cache.tokens - self._start
        if steps < 1:
            raise RuntimeError("no step was counted since the last reset")
        shape = self.weights.shape
        item = self.weights.embedding.element_size()
        kv_item = self.cache.keys.element_size()
        widths = torch.tensor([p.outputs for p in shape.projections], dtype=torch.float64)
        dense = float(shape.layers * shape.projection_params * item)
        read = dense
        if self.thresholds is not None:
            read = float((self._kept_total.cpu().double() * widths).sum()) * item / steps
        entries = float(self._entries_total.sum()) / steps
        # A dense step at position p reads p + 1 entries per layer and KV head.
        full = (self._start + (steps + 1) / 2) * shape.layers * shape.kv_heads
        return Counted(
            steps=steps,
            projection_bytes=read,
            kv_bytes=entries * 2 * shape.head_dim * kv_item,
            head_bytes=float(shape.head_params * item),
            r_p=read / dense,
            r_kv=entries / full,
        )

    def _make_selections(self) -> list[dict[str, Selection]]:
        """Per layer, the selection of every fused projection; empty when the mode reads all weights."""
        shape = self.weights.shape
        if self.thresholds is None:
            return [{} for _ in range(shape.layers)]
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        fused = {
            "qkv": ((0, 1, 2), (0, q, q + kv, q + 2 * kv)),
            "o": ((3,), (0, shape.hidden)),
            "gate_up": ((4, 5), (0, shape.intermediate, 2 * shape.intermediate)),
            "down": ((6,), (0, shape.hidden)),
        }
        values = self.thresholds.values.to(self.weights.device)
        return [
            {
                site: Selection(
                    values[layer, columns[0] : columns[-1] + 1].contiguous(),
                    segments,
                    self._kept[layer, columns[0] : columns[-1] + 1],
                )
                for site, (columns, segments) in fused.items()
            }
            for layer in range(shape.layers)
        ]

    def _build(self) -> list[Op]:
        weights, b, cache = self.weights, self.buffers, self.cache
        ops = [Op("embed", token.bind_embed(self.tokens, cache.position, weights.embedding, b.residual))]
        for index, layer in enumerate(weights.layers):
            ops += self._layer(index, layer)
        final = Norm(weights.final_norm, weights.eps)
        ops.append(Op("head", gemv.bind(b.residual, weights.head, b.logits, norm=final)))
        if self.greedy:
            ops.append(Op("argmax", token.bind_argmax(b.logits, self.tokens, cache.position)))
        lengths = [cache.lengths] if self.packed is None else [cache.lengths, self.packed.lengths]
        kept = None if self.thresholds is None else (self._kept, self._kept_total)
        entries = (self.attended, self._entries_total)
        ops.append(Op("advance", token.bind_advance(cache.position, lengths, entries, kept)))
        return ops

    def _layer(self, index: int, layer: Layer) -> list[Op]:
        b, eps, select = self.buffers, self.weights.eps, self._selections[index]

        def project(site: str, matrix: Matrix, x: torch.Tensor, y: torch.Tensor, norm: Norm | None = None) -> Op:
            add = y is b.residual
            if select:
                return Op(site, sparse_gemv.bind(x, matrix.w_in, y, select[site], matrix.bias, norm, add))
            return Op(site, gemv.bind(x, matrix.w, y, matrix.bias, norm, add))

        mlp_norm = Norm(layer.mlp_norm, eps)
        if select:
            mlp = gate_up.bind_sparse(b.residual, layer.gate_up.w_in, b.act, select["gate_up"], mlp_norm)
        else:
            mlp = gate_up.bind(b.residual, layer.gate_up.w, b.act, mlp_norm)
        return [
            project("qkv", layer.qkv, b.residual, b.qkv, Norm(layer.attention_norm, eps)),
            *self._attention(index, layer),
            project("o", layer.o, b.mixed, b.residual),
            Op("gate_up", mlp),
            project("down", layer.down, b.act, b.residual),
        ]

    def _attention(self, index: int, layer: Layer) -> list[Op]:
        weights, b, cache, packed = self.weights, self.buffers, self.cache, self.packed
        full = (cache.keys[index], cache.values[index])
        own = None if packed is None else (packed.keys[index], packed.values[index], packed.lengths[index])
        place = (weights.inv_freq, cache.position)
        q_norm, k_norm, eps = layer.q_norm, layer.k_norm, weights.eps
        scale, live = weights.shape.head_dim**-0.5, self.attended[index]
        if self._library is None:
            step = attention.bind_step(b.qkv, *place, full, own, live, b.mixed, scale, q_norm, k_norm, eps)
            return [Op("attention", step)]
        keys, values = full if own is None else own[:2]
        return [
            Op("rope_append", rope_append.bind(b.qkv, *place, b.query, full, own, q_norm, k_norm, eps)),
            Op("attention", self._library.bind(index, b.query, keys, values, live, b.mixed, scale)),
        ]


def _buffers(weights: Weights) -> Buffers:
    shape = weights.shape
    q_width = shape.heads * shape.head_dim

    def vector(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32, device=weights.device)

    return Buffers(
        residual=vector(shape.hidden),
        qkv=vector(q_width + 2 * shape.kv_heads * shape.head_dim),
        query=vector(q_width).view(shape.heads, shape.head_dim),
        mixed=vector(q_width),
        act=vector(shape.intermediate),
        logits=vector(shape.vocab),
    )
