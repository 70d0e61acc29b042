"""Reading checkpoints: Hugging Face directories with safetensors, and GGUF files. Never a pickle, never code from the
folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifact.engine import gguf_file
from artifact.engine.rope import inverse_frequencies, positive_number
from artifact.errors import UserError, one_line
from artifact.shapes import Shape, shape_from

if TYPE_CHECKING:
    import torch

# Families whose layer is: norm, q k v, rope, attention, o, norm, gate up, SiLU, down. Qwen3 adds a norm on q and k
# heads.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Checkpoint:
    """A model folder that can be read: dimensions, what the layers need beside weights, and where tensors lie.

    biased: q, k and v have biases. identity: names the model in records and caches: the SHA-256 of a GGUF, or else a
    hash of config.json and of every weight file's name, size and time (hashing 16 GB of weights at every start would
    cost minutes).
    """

    folder: Path
    shape: Shape
    family: str
    eps: float
    inv_freq: tuple[float, ...]
    identity: str
    files: dict[str, Path]
    biased: bool

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the named tensors, each as stored. Raises UserError when a file is not a readable safetensors file."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for file, wanted in by_file.items():
            try:
                with safe_open(str(file), framework="pt") as stream:
                    for name in wanted:
                        yield name, stream.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{file.name} cannot be read as safetensors ({error}); fetch the checkpoint again"
                ) from error


def open_checkpoint(source: str) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file. Raises UserError naming what is missing or not supported."""
    path = Path(source)
    if path.is_file() and path.suffix == ".gguf":
        path = gguf_file.converted(path, FAMILIES)
    if not path.is_dir():
        raise UserError(
            f"model {source!r} is neither a Hugging Face directory nor a .gguf file; pass --model PATH to one"
        )
    config = _config(path)
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise UserError(
            f"{path.name} is a {family or 'model without model_type'!r} checkpoint; "
            f"supported architectures are {', '.join(FAMILIES)}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path.name} uses activation {config['hidden_act']!r}; the gated MLP here is SiLU only")
    if _slides(config, family):
        raise UserError(
            f"{path.name} attends inside a sliding window of {config['sliding_window']} tokens, which the cache here "
            "does not model; pass a model with full attention"
        )
    shape = shape_from(str(path))
    files = _tensor_files(path)
    if config.get("tie_word_embeddings") is False and "lm_head.weight" not in files:
        raise UserError(
            f"{path.name} lacks lm_head.weight, which its config.json does not tie; fetch the checkpoint again"
        )
    return Checkpoint(
        folder=path,
        shape=shape,
        family=family,
        eps=positive_number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        inv_freq=tuple(inverse_frequencies(config, shape.head_dim)),
        identity=_identity(path, files),
        files=files,
        biased=family == "qwen2" or config.get("attention_bias") is True,
    )


def _slides(config: dict[str, Any], family: str) -> bool:
    """Whether a layer attends to recent tokens only: layer_types says so, or the flags of older configs."""
    if not config.get("sliding_window"):
        return False
    layers = config.get("layer_types")
    if isinstance(layers, list):
        return "sliding_attention" in layers
    return bool(config.get("use_sliding_window", family == "mistral"))


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} holds no config.json; pass a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable JSON ({one_line(error)}); fetch the checkpoint again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds {type(config).__name__}, not an object; fetch the checkpoint again")
    return config


def _tensor_files(path: Path) -> dict[str, Path]:
    """Map every tensor name to its file, from the index of a sharded checkpoint or the header of a single file."""
    from safetensors import SafetensorError, safe_open

    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            named = {str(name): path / Path(str(file)).name for name, file in table.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{index.name} in {path.name} is not a weight index ({error!r}); fetch it again") from error
        missing = sorted({file.name for file in named.values() if not _is_file(file)})
        if missing:
            raise UserError(
                f"{path.name} lacks {missing[0][:80]} ({len(missing)} weight files missing); fetch the checkpoint again"
            )
        return named
    single = path / "model.safetensors"
    if not single.is_file():
        pickles = [p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
        found = f"only {pickles[0]}, a pickle that is never loaded" if pickles else "no weights"
        raise UserError(f"{path.name} holds {found}; pass a checkpoint with safetensors files or a GGUF")
    try:
        with safe_open(str(single), framework="pt") as stream:
            return dict.fromkeys(stream.keys(), single)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{single} cannot be read as safetensors ({error}); fetch the checkpoint again") from error


def _is_file(path: Path) -> bool:
    """Whether it is there; a name that no file system takes is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def _identity(path: Path, files: dict[str, Path]) -> str:
    converted = path / "complete"
    if converted.is_file():
        return converted.read_text()[:16]
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(set(files.values())):
        stat = file.stat()
        digest.update(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
