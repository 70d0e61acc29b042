"""Rotary frequencies of a config.json, in both spellings, against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from artifact.engine.rope import inverse_frequencies, llama3_parameters
from artifact.errors import UserError

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def by_transformers(parameters: dict[str, Any], head_dim: int, theta: float) -> list[float]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    frequencies: list[float] = LlamaRotaryEmbedding(config).inv_freq.tolist()
    return frequencies


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "llama3", **LLAMA3, "factor": 32.0},
    ],
)
def test_fault_27_frequencies_equal_transformers_in_every_spelling(
    parameters: dict[str, Any], head_dim: int, theta: float
) -> None:
    expected = by_transformers(parameters, head_dim, theta)
    scaling = {key: value for key, value in parameters.items() if key != "rope_type"}
    kind = parameters["rope_type"]
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": {"rope_theta": theta, **parameters}},
        {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **scaling}},
        {"rope_theta": theta, "rope_scaling": {"type": kind, **scaling}},
        # Both keys, as some published files have them: the newer spelling is meant, the newer object is overruled.
        {"rope_theta": theta, "rope_scaling": {"type": "yarn", "rope_type": kind, **scaling}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_scaling": {"type": kind, **scaling}},
    ]
    for config in spellings:
        assert inverse_frequencies(config, head_dim) == pytest.approx(expected, rel=5e-6), config


def test_a_config_without_any_of_it_has_the_default() -> None:
    expected = by_transformers({"rope_type": "default"}, 64, 10000.0)
    for config in ({}, {"rope_scaling": None}, {"rope_scaling": None, "rope_parameters": None}):
        assert inverse_frequencies(config, 64) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope scaling 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope factor is '4'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], not an object"),
        ({"rope_theta": "many"}, "rope_theta is 'many'"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial rotary"),
    ],
)
def test_fault_27_what_is_not_applied_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        inverse_frequencies(config, 64)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_is_recognised_from_its_factors(head_dim: int, factor: float) -> None:
    plain = by_transformers({"rope_type": "default"}, head_dim, 500000.0)
    scaled = by_transformers({"rope_type": "llama3", **LLAMA3, "factor": factor}, head_dim, 500000.0)
    factors = [p / s for p, s in zip(plain, scaled, strict=True)]
    found = llama3_parameters(factors, 500000.0)
    assert found is not None
    assert inverse_frequencies({"rope_parameters": found}, head_dim) == pytest.approx(scaled, rel=1e-4)
    assert llama3_parameters([1.0] * (head_dim // 2 - 1) + [2.0], 500000.0) is None
    assert llama3_parameters([f * 1.01 for f in factors], 500000.0) is None
