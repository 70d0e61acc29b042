"""Weights of a decoder in the layouts that the kernels read, from a checkpoint or made up with exact shapes.

A projection is held output-major for the dense step and, once a sparse step has been bound, input-major as well (one
row per input channel), where a skipped channel is a skipped contiguous row. Loading checks every tensor: name, shape
and that all numbers are finite.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from artifact.engine.checkpoints import Checkpoint, open_checkpoint
from artifact.engine.rope import inverse_frequencies
from artifact.errors import UserError, one_line
from artifact.shapes import Shape
from kernels.memory import empty, keep, placed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_held: dict[tuple[str, str, torch.dtype], Weights] = {}  # by identity, device and dtype
_tokenizers: dict[str, PreTrainedTokenizerBase] = {}  # of what is held, by identity
SLACK_BYTES = 8 << 20  # of what is kept: biases, and the alignment of every tensor
STORED = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Matrix:
    """One (fused) projection: `w` (N, K) output-major, and the same numbers input-major for whoever skips inputs."""

    w: torch.Tensor
    bias: torch.Tensor | None = None

    @cached_property
    def w_in(self) -> torch.Tensor:
        """(K, N), made when it is first asked for: dense decoding and scoring in one pass do without."""
        return placed(self.w.T)

    @classmethod
    def input_major(cls, w_in: torch.Tensor) -> Matrix:
        """Hold w_in (K, N) alone, where memory has no room for both; `w` is then a view that dense kernels refuse."""
        made = cls(w_in.T)
        made.__dict__["w_in"] = w_in
        return made


@dataclass(frozen=True)
class Layer:
    """One decoder layer: fused q|k|v and gate|up, norms, and the q/k norms of Qwen3."""

    attention_norm: torch.Tensor
    qkv: Matrix
    o: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """A whole decoder. `embedding` (V, H), `head` (V, H) output-major; tied models hold one tensor under both names."""

    shape: Shape
    eps: float
    inv_freq: torch.Tensor
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    identity: str

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def hold(source: str, dtype: torch.dtype, most_bytes: int) -> bool:
    """Load a checkpoint into CPU memory for good, in both layouts, with its tokenizer: `load` and `load_tokenizer` hand
    them out in this process and its forks.

    Returns whether it did: not for one of more than `most_bytes`. Raises UserError like `load`.
    """
    shape = open_checkpoint(source).shape
    if 2 * (shape.layers * shape.projection_params + shape.head_params) * dtype.itemsize > most_bytes:
        return False
    heads = 1 if shape.tied_head else 2
    keep((2 * shape.layers * shape.projection_params + heads * shape.head_params) * dtype.itemsize + SLACK_BYTES)
    weights = load(source, "cpu", dtype)
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            _ = matrix.w_in
    _held[weights.identity, "cpu", dtype] = weights
    with contextlib.suppress(UserError):  # weights without a tokenizer can be timed
        _tokenizers[weights.identity] = load_tokenizer(source)
    return True


def load(source: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Weights:
    """Load a Hugging Face directory or GGUF. Raises UserError for missing, misshapen or non-finite tensors."""
    checkpoint = open_checkpoint(source)
    if (held := _held.get((checkpoint.identity, device, dtype))) is not None:
        return held
    reader = _Reader(checkpoint, device, dtype)
    shape = checkpoint.shape
    embedding = reader.tensor("model.embed_tokens.weight", (shape.vocab, shape.hidden))
    # A tied head may be missing from the file although the config forgot to say so, and the other way round.
    untied = "lm_head.weight" in checkpoint.files and not shape.tied_head
    head = reader.tensor("lm_head.weight", (shape.vocab, shape.hidden)) if untied else embedding
    return Weights(
        shape=shape,
        eps=checkpoint.eps,
        inv_freq=torch.tensor(checkpoint.inv_freq, dtype=torch.float32, device=device),
        embedding=embedding,
        layers=tuple(_layer(reader, shape, i) for i in range(shape.layers)),
        final_norm=reader.tensor("model.norm.weight", (shape.hidden,), torch.float32),
        head=head,
        identity=checkpoint.identity,
    )


def widened(weights: Weights) -> Weights:
    """The same numbers in float32; weights that are stored so come back as they are."""
    if weights.dtype == torch.float32:
        return weights

    def wide(matrix: Matrix) -> Matrix:
        return Matrix(matrix.w.float(), matrix.bias)

    embedding = weights.embedding.float()
    return replace(
        weights,
        embedding=embedding,
        layers=tuple(
            replace(one, qkv=wide(one.qkv), o=wide(one.o), gate_up=wide(one.gate_up), down=wide(one.down))
            for one in weights.layers
        ),
        head=embedding if weights.head is weights.embedding else weights.head.float(),
    )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies with a checkpoint. Raises UserError when there is none, or it is another model's."""
    checkpoint = open_checkpoint(source)
    if (held := _tokenizers.get(checkpoint.identity)) is not None:
        return held
    import transformers

    folder = checkpoint.folder
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder.name} holds no usable tokenizer ({one_line(error)}); add tokenizer.json to the directory"
        ) from error
    highest = max(found.get_vocab().values(), default=-1)
    if not 0 <= highest < checkpoint.shape.vocab:
        raise UserError(
            f"{folder.name}: its tokenizer knows token {highest}, its weights {checkpoint.shape.vocab} tokens; "
            "take the tokenizer that belongs to the checkpoint"
        )
    return found


def synthetic(shape: Shape, device: str, dtype: torch.dtype, seed: int = 0, input_major: bool = False) -> Weights:
    """Weights of exact shape with normal entries scaled by 1/sqrt(K), for timing where no trained ones can be had.

    input_major: hold projections for sparse steps alone.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        values = empty((rows, columns), dtype, device)
        return values.normal_(0.0, scale or columns**-0.5, generator=generator)

    def matrix(outputs: int, inputs: int) -> Matrix:
        if input_major:
            return Matrix.input_major(normal(inputs, outputs, inputs**-0.5))
        return Matrix(normal(outputs, inputs))

    def layer() -> Layer:
        ones = torch.ones(shape.hidden, device=device)
        q_width = shape.heads * shape.head_dim
        return Layer(
            attention_norm=ones,
            qkv=matrix(q_width + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
            o=matrix(shape.hidden, q_width),
            mlp_norm=ones,
            gate_up=matrix(2 * shape.intermediate, shape.hidden),
            down=matrix(shape.hidden, shape.intermediate),
        )

    embedding = normal(shape.vocab, shape.hidden)
    return Weights(
        shape=shape,
        eps=1e-5,
        inv_freq=torch.tensor(inverse_frequencies({"rope_theta": 500000.0}, shape.head_dim), device=device),
        embedding=embedding,
        layers=tuple(layer() for _ in range(shape.layers)),
        final_norm=torch.ones(shape.hidden, device=device),
        head=embedding if shape.tied_head else normal(shape.vocab, shape.hidden),
        identity=f"synthetic-{shape.name}-{seed}",
    )


class _Reader:
    """Reads tensors of one checkpoint, checks them and places them."""

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype

    def has(self, name: str) -> bool:
        return name in self.checkpoint.files

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.fused([name], [shape], dtype)

    def fused(self, names: list[str], shapes: list[tuple[int, ...]], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the named tensors stacked along the first axis, in the order of `names`."""
        folder = self.checkpoint.folder.name
        for name in names:
            if not self.has(name):
                raise UserError(f"{folder} lacks the tensor {name}; the checkpoint does not fit its config.json")
        dtype = dtype or self.dtype
        rows = sum(shape[0] for shape in shapes)
        read = dict(self.checkpoint.tensors(names))
        for name, shape in zip(names, shapes, strict=True):  # before anything of the config's size is allocated
            value = read[name]
            if tuple(value.shape) != shape:
                raise UserError(f"{folder}: {name} has shape {tuple(value.shape)}, config.json implies {shape}")
            if value.dtype not in STORED:
                raise UserError(f"{folder}: {name} is stored as {value.dtype}; pass a checkpoint that is not quantized")
        out = empty((rows, *shapes[0][1:]), dtype, self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            value = read[name]
            part = out[start : start + shape[0]]
            part.copy_(value)
            # One pass: the sum of finite numbers of a trained weight is finite, and NaN or inf never cancel out of it.
            if not bool(torch.isfinite(part.sum(dtype=torch.float32))):
                raise UserError(
                    f"{folder}: {name} holds NaN or infinite numbers in {dtype}; fetch the checkpoint again"
                )
            start += shape[0]
        return out

    def matrix(self, names: list[str], outputs: list[int], inputs: int, biased: bool = False) -> Matrix:
        """Return a fused projection, with the fused bias when the checkpoint has one or must have."""
        w = self.fused([f"{name}.weight" for name in names], [(rows, inputs) for rows in outputs])
        biases = [f"{name}.bias" for name in names]
        bias = None
        if biased or any(self.has(name) for name in biases):
            bias = self.fused(biases, [(rows,) for rows in outputs], torch.float32)
        return Matrix(w, bias)


def _layer(reader: _Reader, shape: Shape, index: int) -> Layer:
    name = f"model.layers.{index}"
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"

    def norm(which: str, size: int) -> torch.Tensor:
        return reader.tensor(f"{name}.{which}.weight", (size,), torch.float32)

    def head_norm(which: str) -> torch.Tensor | None:
        expected = reader.checkpoint.family == "qwen3" or reader.has(f"{attention}.{which}.weight")
        return norm(f"self_attn.{which}", shape.head_dim) if expected else None

    if reader.has(f"{mlp}.gate_proj.bias") or reader.has(f"{mlp}.up_proj.bias"):
        raise UserError(f"{reader.checkpoint.folder.name} has biases in its gated MLP, which are not supported")

    return Layer(
        attention_norm=norm("input_layernorm", shape.hidden),
        qkv=reader.matrix(
            [f"{attention}.{p}_proj" for p in "qkv"],
            [q_width, kv_width, kv_width],
            shape.hidden,
            reader.checkpoint.biased,
        ),
        o=reader.matrix([f"{attention}.o_proj"], [shape.hidden], q_width),
        mlp_norm=norm("post_attention_layernorm", shape.hidden),
        gate_up=reader.matrix([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [shape.intermediate] * 2, shape.hidden),
        down=reader.matrix([f"{mlp}.down_proj"], [shape.hidden], shape.intermediate),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
    )
