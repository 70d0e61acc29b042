"""Model dimensions: a published model by name, or the config.json of a checkpoint. Knows no weights, imports no torch.

artifact predict Llama-3.1-8B          artifact predict path/to/config.json
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from artifact.errors import UserError, one_line

MAX_CONFIG_BYTES = 4 << 20  # a larger "config.json" is a weights file given by mistake

# Far above any published model and small enough that no product of them leaves a float's exact integers by surprise.
LIMITS = {
    "hidden": 1 << 17,
    "layers": 1 << 12,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate": 1 << 20,
    "vocab": 1 << 24,
    "window": 1 << 30,
}

CONFIG_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "window": "max_position_embeddings",
}

# Families whose layer is exactly the seven projections the byte account counts (fused spellings read the same bytes).
FAMILIES = ("granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
# Keys of layers the account does not describe: expert routing and compressed (latent) caches.
FOREIGN_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
# transformers' own default when the file leaves head_dim out; everywhere else it is hidden / heads.
HEAD_DIM_DEFAULT = {"qwen3": 128}


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dimension(value: object, key: str, limit: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise UserError(
            f"{name}: {key} is {_short(value)}, not an integer between 1 and {limit}; check the config.json"
        )
    return value


@dataclass(frozen=True)
class Projection:
    """One weight matrix of a layer: `inputs` channels in, `outputs` channels out."""

    name: str
    inputs: int
    outputs: int

    @property
    def params(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder whose layers hold q, k, v, o, gate, up and down.

    `head_dim` is a dimension of its own: 2560 / 32 heads with head_dim 128 exists, and there q and o are not square.
    `window` is the released context length in tokens. Raises UserError on a value no model can have.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    window: int
    tied_head: bool

    def __post_init__(self) -> None:
        for field, limit in LIMITS.items():
            _dimension(getattr(self, field), CONFIG_KEYS[field], limit, self.name)
        if self.heads % self.kv_heads:
            raise UserError(
                f"{self.name}: num_attention_heads {self.heads} is not a multiple of num_key_value_heads "
                f"{self.kv_heads}; check the config.json"
            )
        if not isinstance(self.tied_head, bool):
            raise UserError(f"{self.name}: tie_word_embeddings is {_short(self.tied_head)}, neither true nor false")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The seven projections of one layer, in the order a step reads them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Projection("q", self.hidden, q),
            Projection("k", self.hidden, kv),
            Projection("v", self.hidden, kv),
            Projection("o", q, self.hidden),
            Projection("gate", self.hidden, self.intermediate),
            Projection("up", self.hidden, self.intermediate),
            Projection("down", self.intermediate, self.hidden),
        )

    @property
    def projection_params(self) -> int:
        """P of the paper: parameters of the seven projections of one layer."""
        return sum(p.params for p in self.projections)

    @property
    def ffn_params(self) -> int:
        """Parameters of gate, up and down of one layer."""
        return 3 * self.hidden * self.intermediate

    @property
    def head_params(self) -> int:
        """Parameters of the output head, which a step reads in full whether or not it is tied to the embedding."""
        return self.vocab * self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """Cache elements one layer stores per token: keys and values of the KV heads, not of the query heads."""
        return 2 * self.kv_heads * self.head_dim


def _known(*rows: Shape) -> dict[str, Shape]:
    return {_plain(shape.name): shape for shape in rows}


def _plain(name: str) -> str:
    """The part of a model name that identifies it: no organisation, case or separators."""
    return re.sub(r"[\s_]+", "-", name.strip().rsplit("/", 1)[-1].lower()).removeprefix("meta-")


# Order: name, hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, window, tied_head.
KNOWN: dict[str, Shape] = _known(
    Shape("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256, 131072, False),
    Shape("Llama-3.1-70B", 8192, 80, 64, 8, 128, 28672, 128256, 131072, False),
    Shape("Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128256, 131072, True),
    Shape("Llama-3.2-3B", 3072, 28, 24, 8, 128, 8192, 128256, 131072, True),
    Shape("Llama-3.3-70B", 8192, 80, 64, 8, 128, 28672, 128256, 131072, False),
    Shape("Llama-3-8B", 4096, 32, 32, 8, 128, 14336, 128256, 8192, False),
    Shape("Llama-2-7B", 4096, 32, 32, 32, 128, 11008, 32000, 4096, False),
    Shape("Llama-2-13B", 5120, 40, 40, 40, 128, 13824, 32000, 4096, False),
    Shape("Mistral-7B-v0.3", 4096, 32, 32, 8, 128, 14336, 32768, 32768, False),
    Shape("Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151936, 40960, True),
    Shape("Qwen3-1.7B", 2048, 28, 16, 8, 128, 6144, 151936, 40960, True),
    Shape("Qwen3-4B", 2560, 36, 32, 8, 128, 9728, 151936, 40960, True),
    Shape("Qwen3-8B", 4096, 36, 32, 8, 128, 12288, 151936, 40960, False),
    Shape("Qwen3-14B", 5120, 40, 40, 8, 128, 17408, 151936, 40960, False),
    Shape("Qwen3-32B", 5120, 64, 64, 8, 128, 25600, 151936, 40960, False),
    Shape("Qwen2.5-0.5B", 896, 24, 14, 2, 64, 4864, 151936, 32768, True),
    Shape("Qwen2.5-7B", 3584, 28, 28, 4, 128, 18944, 152064, 131072, False),
    Shape("Qwen2.5-7B-Instruct", 3584, 28, 28, 4, 128, 18944, 152064, 32768, False),
    Shape("Qwen2.5-32B", 5120, 64, 40, 8, 128, 27648, 152064, 131072, False),
    Shape("SmolLM2-135M", 576, 30, 9, 3, 64, 1536, 49152, 8192, True),
    Shape("SmolLM2-360M", 960, 32, 15, 5, 64, 2560, 49152, 8192, True),
    Shape("SmolLM2-1.7B", 2048, 24, 32, 32, 64, 8192, 49152, 8192, True),
)


def known_shape(name: str) -> Shape:
    """A published model by name, whatever its case, organisation or `-Instruct` ending. Raises UserError if unknown."""
    plain = _plain(name)
    for candidate in (plain, re.sub(r"-(instruct|chat|hf|it)$", "", plain)):
        if candidate in KNOWN:
            return KNOWN[candidate]
    near = difflib.get_close_matches(plain, KNOWN, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(KNOWN[key].name for key in near)}?"
        if near
        else (f"known are {', '.join(shape.name for shape in KNOWN.values())}")
    )
    raise UserError(f"no model is known as {_short(name)}; {hint} A config.json or a checkpoint directory works too")


def shape_from(source: str) -> Shape:
    """Dimensions from a config.json, a checkpoint directory that holds one, or the name of a published model.

    A path that exists wins over a name. Raises UserError naming the file or name and what to give instead.
    """
    if not source.strip() or "\0" in source:
        raise UserError("the model is empty; give a model name, a config.json or a checkpoint directory")
    try:
        path = Path(source).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~ that names no user
        raise UserError(f"cannot look up {_short(source)} ({one_line(error)}); give a model name") from None
    if is_dir:
        if not (path / "config.json").is_file():
            raise UserError(f"{source} holds no config.json; give a checkpoint directory that does, or a model name")
        return _from_file(path / "config.json", path.resolve().name)
    if is_file:
        return _from_file(path, path.resolve().parent.name if path.name == "config.json" else path.stem)
    if path.suffix in (".json", ".gguf") or source.startswith((".", "/", "~")):
        raise UserError(f"{source} does not exist; give a config.json, a checkpoint directory or a model name")
    return known_shape(source)


def shape_from_config(config: dict[str, Any], name: str) -> Shape:
    """Dimensions from a parsed config.json. Raises UserError on an absent or absurd key or an unsupported family."""
    nested = config.get("text_config")
    if isinstance(nested, dict) and "hidden_size" not in config:
        config = nested
    family = config.get("model_type")
    if family is not None and family not in FAMILIES:
        raise UserError(f"{name}: model_type {_short(family)} is not supported; supported are {', '.join(FAMILIES)}")
    foreign = [key for key in FOREIGN_KEYS if config.get(key)]
    if foreign:
        raise UserError(f"{name}: {foreign[0]} is set; the byte account covers dense layers with a plain KV cache")
    values: dict[str, Any] = {}
    for field, key in CONFIG_KEYS.items():
        value = config.get(key)
        if value is None and field == "kv_heads" and (family in (None, "llama") or key in config):
            value = values["heads"]
        if value is None and field == "head_dim":
            value = _default_head_dim(values["hidden"], values["heads"], family, name)
        if value is None:
            raise UserError(f"{name}: {key} is missing from the config.json; is it that of a language model?")
        values[field] = value
    shape = Shape(name=name, tied_head=config.get("tie_word_embeddings", False), **values)
    return _within_sliding_window(shape, config)


def _default_head_dim(hidden: object, heads: object, family: object, name: str) -> int:
    if isinstance(family, str) and family in HEAD_DIM_DEFAULT:
        return HEAD_DIM_DEFAULT[family]
    width = _dimension(hidden, "hidden_size", LIMITS["hidden"], name)
    count = _dimension(heads, "num_attention_heads", LIMITS["heads"], name)
    if width % count:
        raise UserError(
            f"{name}: hidden_size {width} is not a multiple of num_attention_heads {count} and head_dim is not given; "
            "add head_dim to the config.json"
        )
    return width // count


def _within_sliding_window(shape: Shape, config: dict[str, Any]) -> Shape:
    """Past an active sliding window a dense step stops reading the whole cache, so the account ends there."""
    sliding = config.get("sliding_window")
    if sliding is None or config.get("use_sliding_window", True) is False:
        return shape
    layers = config.get("layer_types")
    if isinstance(layers, list) and "sliding_attention" not in layers:
        return shape
    tokens = _dimension(sliding, "sliding_window", LIMITS["window"], shape.name)
    return replace(shape, window=min(shape.window, tokens))


def _from_file(path: Path, name: str) -> Shape:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(f"{path} is too large for a config.json; give the config.json beside the weights")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UserError(f"{path} is not valid JSON; give the config.json of a checkpoint") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a JSON object; give the config.json of a checkpoint")
    return shape_from_config(config, name or "model")
