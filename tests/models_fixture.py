"""Tiny random checkpoints of every supported family, written by transformers itself, so that loading is really tested.

transformers initialises norms to one and biases to zero, and small weights make attention uniform: with those, a norm
or bias that the engine forgot would not show. Here every parameter is drawn at a size at which it matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from artifact.engine.models import Weights

VOCAB = 311


@dataclass(frozen=True)
class Tiny:
    """One small model: what differs from the common dimensions, as config.json spells it."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """A tiny model as transformers runs it, where it was saved, and as the engine loaded it from there."""

    model: Any
    path: Path
    weights: Weights


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 152,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,  # 3 x 64 is not the hidden size: q and o are not square
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Scaled as Llama 3.1 is, around a trained window short enough that a hundred tokens feel it.
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}

MODELS: dict[str, Tiny] = {
    "llama": Tiny("llama"),
    "llama-tied": Tiny("llama", {"tie_word_embeddings": True}),
    "llama-biased": Tiny("llama", {"attention_bias": True, "num_key_value_heads": 3}),
    "llama-llama3": Tiny("llama", {"rope_parameters": {"rope_type": "llama3", **LLAMA3}}),
    "llama-linear": Tiny("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": Tiny("mistral", {"sliding_window": None, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "qwen2": Tiny("qwen2", {"hidden_size": 192, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3": Tiny("qwen3", {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
}


def build(name: str, seed: int = 0) -> Any:
    """Return the transformers model `name` in float32, every parameter random."""
    import transformers

    tiny = MODELS[name]
    options = {**COMMON, **tiny.options}
    if tiny.family == "qwen2":
        del options["head_dim"]  # Qwen2 has no such key: a head is hidden / heads
    config = transformers.AutoConfig.for_model(tiny.family, **options)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1.0 + 0.4 * noise)
            elif "embed_tokens" in key:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    return model


def saved(name: str, folder: Path, seed: int = 0) -> tuple[Any, Path]:
    """Build `name`, save it under `folder` and return (transformers model, directory)."""
    model = build(name, seed)
    path = folder / name
    model.save_pretrained(path)
    return model, path


def token_ids(count: int, seed: int = 0) -> torch.Tensor:
    """Return (count,) random int64 ids."""
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
