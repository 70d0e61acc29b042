"""GGUF files: checked, then converted once by transformers into a Hugging Face directory under the data folder.

The directory is named by the file's SHA-256; from then on it is read like any other (30 s the first time, memory-mapped
afterwards). transformers fills a tensor it does not find with random numbers, drops one it does not know and knows
nothing of rotary scaling in this format, so all three are settled here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifact.embedded import data_folder
from artifact.engine import gguf_header
from artifact.engine.rope import llama3_parameters
from artifact.errors import UserError, one_line

_LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_ADDED = {
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
}
_OPTIONAL = {"output.weight", "rope_freqs.weight"}


@dataclass(frozen=True)
class _Header:
    """What the conversion needs of a file: architecture, plain metadata, shapes of the tensors (inputs first), rotary
    factors (head_dim / 2,) or None.
    """

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]
    rope_factors: Sequence[float] | None


def converted(gguf: Path, families: Sequence[str]) -> Path:
    """Return the converted directory of a GGUF file, converting it on first use.

    Raises UserError for a file that is damaged or holds a model outside `families`, and for a full disk.
    """
    stat = gguf.stat()
    sha256 = _sha256(gguf, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    target = data_folder() / "converted" / sha256[:16]
    if (target / "complete").is_file():
        return target
    header = _header(gguf)
    if header.architecture not in families:
        raise UserError(
            f"{gguf.name} holds a {header.architecture!r} model; supported architectures are {', '.join(families)}"
        )
    _check_tensors(gguf.name, header)
    _check_dimensions(gguf.name, header)
    rope = _rope(gguf.name, header)
    head_dim = header.metadata.get(f"{header.architecture}.attention.key_length")
    work = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=target.parent))
        _convert(gguf, work, rope, head_dim)
        (work / "complete").write_text(sha256)
        if not target.exists():
            os.replace(work, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}); free some disk or set ARTIFACT_DATA"
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return target


@functools.cache
def _sha256(gguf: Path, *written: int) -> str:
    """Hash a file, once in a process and its forks for as long as nobody has `written` it anew."""
    with gguf.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type, unused-ignore]


def _header(gguf: Path) -> _Header:
    import gguf as library

    try:
        gguf_header.check(gguf)
        reader = library.GGUFReader(str(gguf))
        metadata = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        factors = [t.data.tolist() for t in reader.tensors if t.name == "rope_freqs.weight"]
        return _Header(
            str(metadata["general.architecture"]),
            metadata,
            {t.name: tuple(int(n) for n in t.shape) for t in reader.tensors},
            factors[0] if factors else None,
        )
    except (ValueError, KeyError, IndexError, TypeError, OSError, OverflowError, MemoryError) as error:
        raise UserError(f"{gguf.name} is not a readable GGUF file ({one_line(error)}); fetch it again") from error


def _check_tensors(name: str, header: _Header) -> None:
    """Raise UserError unless the file holds exactly the tensors of its architecture."""
    layers = header.metadata.get(f"{header.architecture}.block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(header.tensors):
        raise UserError(f"{name} has {len(header.tensors)} tensors for {layers} layers (block_count); fetch it again")
    parts = [f"{part}.weight" for part in _LAYER] + list(_ADDED.get(header.architecture, ()))
    required = {f"blk.{i}.{part}" for i in range(layers) for part in parts} | {
        "token_embd.weight",
        "output_norm.weight",
    }
    held = header.tensors.keys()
    missing, unknown = sorted(required - held), sorted(held - required - _OPTIONAL)
    if missing:
        raise UserError(f"{name} lacks the tensor {missing[0]} ({len(missing)} missing); fetch it again")
    if unknown:
        raise UserError(
            f"{name} holds {unknown[0]} ({len(unknown)} such tensors), which no supported {header.architecture} layer "
            "has; convert the model to a Hugging Face directory if it is one"
        )


def _check_dimensions(name: str, header: _Header) -> None:
    """Raise UserError unless metadata and tensors agree: transformers would allocate whatever the metadata says."""

    def value(key: str) -> int:
        found = header.metadata.get(f"{header.architecture}.{key}")
        if not isinstance(found, int) or found < 1:
            raise UserError(f"{name} has {key} {found!r}, not a positive integer; fetch it again")
        return found

    hidden, heads, kv_heads = (
        value(key) for key in ("embedding_length", "attention.head_count", "attention.head_count_kv")
    )
    given = f"{header.architecture}.attention.key_length" in header.metadata
    head_dim = value("attention.key_length") if given else hidden // heads
    vocab = header.tensors["token_embd.weight"][-1]
    expected = {
        "token_embd": (hidden, vocab),
        "blk.0.attn_q": (hidden, heads * head_dim),
        "blk.0.attn_k": (hidden, kv_heads * head_dim),
        "blk.0.ffn_gate": (hidden, value("feed_forward_length")),
    }
    for tensor, shape in expected.items():
        if (found := header.tensors[f"{tensor}.weight"]) != shape:
            raise UserError(f"{name}: {tensor} has shape {found}, its metadata imply {shape}; fetch it again")
    if header.metadata.get(f"{header.architecture}.vocab_size", vocab) != vocab:
        raise UserError(f"{name} has embeddings for {vocab} tokens and another vocab_size; fetch it again")


def _rope(name: str, header: _Header) -> dict[str, Any]:
    """Return rope_parameters for config.json. Raises UserError for a scaling that could not be applied exactly."""

    def value(key: str, default: Any = None) -> Any:
        return header.metadata.get(f"{header.architecture}.rope.{key}", default)

    plain = {"rope_type": "default", "rope_theta": value("freq_base", 10000.0)}
    kind = value("scaling.type", "none")
    if value("scale_linear") is not None:  # the older spelling
        kind = "linear"
    if kind not in ("none", "linear"):
        raise UserError(
            f"{name} asks for rope scaling {kind!r}, which is not supported; supported are linear and llama3"
        )
    if kind == "linear":
        plain.update(rope_type="linear", factor=value("scaling.factor", value("scale_linear")))
    if header.rope_factors is None:
        return plain
    scaled = llama3_parameters(header.rope_factors, plain["rope_theta"])
    if scaled is None or kind == "linear":
        raise UserError(f"{name} scales its rotary frequencies in a way that is not Llama 3's; it is not supported")
    return scaled


def _convert(gguf: Path, target: Path, rope: dict[str, Any], head_dim: int | None) -> None:
    """Write config, tokenizer and float32 tensors; transformers itself declines to save a model that came from a
    GGUF.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    from artifact.engine.prepared_files import save

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(str(gguf.parent), **where)
        if head_dim is not None:  # transformers takes it from the hidden size, or from a default
            config.head_dim = head_dim
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), config=config, dtype=torch.float32, **where
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise UserError(
            f"{gguf.name} could not be loaded by transformers ({one_line(error)}); fetch it again"
        ) from error
    tied = model.config.tie_word_embeddings
    tensors = {name: one for name, one in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save(target / "model.safetensors", tensors)
    dropped = ("quantization_config", "_name_or_path", "_model_name_or_path")
    kept = {key: value for key, value in model.config.to_dict().items() if key not in dropped}
    kept["rope_parameters"] = rope
    (target / "config.json").write_text(json.dumps(kept, indent=1, sort_keys=True, default=str))
    tokenizer.save_pretrained(str(target))
