"""Rotary frequencies of a checkpoint from its config.json: default, linear and llama3 scaling. Pure arithmetic.

Kept apart from transformers, whose import alone costs seconds in every measuring process; the tests compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from artifact.errors import UserError

LEAST, LARGEST = 1e-30, 1e30  # of any number in a config: what lies beyond overflows in a power


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> list[float]:
    """Return the head_dim / 2 inverse frequencies (radians per token), scaled as the config says.

    Reads `rope_theta` and `rope_scaling` (older spelling, with `type` or `rope_type`) or `rope_parameters` (newer).
    Raises UserError for a scaling this engine does not apply: running without it would silently be another model.
    """
    parameters: dict[str, Any] = {}
    kind = None
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key) or {}
        if not isinstance(value, Mapping):
            raise UserError(f"config.json: {key} is {value!r}, not an object; check the file")
        parameters.update(value)
        kind = value.get("rope_type") or value.get("type") or kind
    theta = positive_number(parameters.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and positive_number(partial, "partial_rotary_factor") != 1.0:
        raise UserError(
            "config.json asks for a partial rotary embedding, which no supported family uses; check the checkpoint"
        )
    plain = [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if kind in ("default", None):
        return plain
    if kind == "linear":
        factor = positive_number(parameters.get("factor"), "rope factor")
        return [f / factor for f in plain]
    if kind == "llama3":
        return [_llama3(f, parameters) for f in plain]
    raise UserError(
        f"config.json asks for rope scaling {kind!r}, which is not supported; supported are default, linear and llama3"
    )


def _llama3(frequency: float, parameters: Mapping[str, Any]) -> float:
    """Llama 3.1's scaling: long wavelengths divided by the factor, short ones kept, a linear ramp between."""
    factor = positive_number(parameters.get("factor"), "rope factor")
    low = positive_number(parameters.get("low_freq_factor"), "low_freq_factor")
    high = positive_number(parameters.get("high_freq_factor"), "high_freq_factor")
    trained = positive_number(parameters.get("original_max_position_embeddings"), "original_max_position_embeddings")
    if low >= high:
        raise UserError(f"config.json: low_freq_factor {low} is not below high_freq_factor {high}; check the file")
    wavelength = 2.0 * math.pi / frequency
    if wavelength > trained / low:
        return frequency / factor
    if wavelength < trained / high:
        return frequency
    ramp = (trained / wavelength - low) / (high - low)
    return (1.0 - ramp) * frequency / factor + ramp * frequency


def llama3_parameters(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """Return the rope_parameters whose scaling divides frequency i by factors[i], or None when they are not Llama 3's.

    A GGUF stores the factors alone. All published Llama 3 models share the three other numbers.
    """
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = inverse_frequencies({"rope_theta": theta}, 2 * len(factors))
    scaled = inverse_frequencies({"rope_parameters": parameters}, 2 * len(factors))
    same = all(math.isclose(p / s, f, rel_tol=1e-4) for p, s, f in zip(plain, scaled, factors, strict=True))
    return parameters if same else None


def positive_number(value: object, name: str) -> float:
    """Return a positive number that powers can be taken of, or raise UserError naming the key."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not LEAST <= value <= LARGEST:
        raise UserError(f"config.json: {name} is {repr(value)[:60]}, not a positive number; check the file")
    return float(value)
