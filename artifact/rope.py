"""Rotary frequencies of a checkpoint from its config.json: default, linear and llama3 scaling. Pure arithmetic.

Kept apart from transformers, whose import alone costs seconds in every measuring process; the tests compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from artifact.errors import UserError


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> list[float]:
    """Return the head_dim / 2 inverse frequencies (radians per token), scaled as the config says.

    Reads `rope_theta` and `rope_scaling` (older spelling, with `type` or `rope_type`) or `rope_parameters` (newer).
    Raises UserError for a scaling this engine does not apply: running without it would silently be another model.
    """
    parameters = dict(config.get("rope_parameters") or {})
    parameters.update(config.get("rope_scaling") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = _number(parameters.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta")
    if _number(config.get("partial_rotary_factor", 1.0), "partial_rotary_factor") != 1.0:
        raise UserError(
            "config.json asks for a partial rotary embedding, which no supported family uses; check the checkpoint"
        )
    plain = [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if kind in ("default", None):
        return plain
    if kind == "linear":
        factor = _number(parameters.get("factor"), "rope factor")
        return [f / factor for f in plain]
    if kind == "llama3":
        return [_llama3(f, parameters) for f in plain]
    raise UserError(
        f"config.json asks for rope scaling {kind!r}, which is not supported; supported are default, linear and llama3"
    )


def _llama3(frequency: float, parameters: Mapping[str, Any]) -> float:
    """Llama 3.1's scaling: long wavelengths divided by the factor, short ones kept, a linear ramp between."""
    factor = _number(parameters.get("factor"), "rope factor")
    low = _number(parameters.get("low_freq_factor"), "low_freq_factor")
    high = _number(parameters.get("high_freq_factor"), "high_freq_factor")
    trained = _number(parameters.get("original_max_position_embeddings"), "original_max_position_embeddings")
    wavelength = 2.0 * math.pi / frequency
    if wavelength > trained / low:
        return frequency / factor
    if wavelength < trained / high:
        return frequency
    ramp = (trained / wavelength - low) / (high - low)
    return (1.0 - ramp) * frequency / factor + ramp * frequency


def _number(value: object, name: str) -> float:
    """Return a positive finite number or raise UserError naming the key."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise UserError(f"config.json: {name} is {value!r}, not a positive number; check the file")
    return float(value)
