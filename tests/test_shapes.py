"""Dimensions: known models, config.json files good and bad, and the parameter counts of real modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact.errors import UserError
from artifact.shapes import CONFIG_KEYS, FAMILIES, KNOWN, LIMITS, Shape, known_shape, shape_from, shape_from_config

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def config(**changes: Any) -> dict[str, Any]:
    return {**LLAMA_8B, **changes}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA_8B.items() if key not in keys}


def test_a_config_gives_the_same_shape_as_the_name(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    assert shape_from(str(folder)) == shape_from(str(folder / "config.json")) == shape_from("Llama-3.1-8B")


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "LLAMA-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "Meta-Llama-3.1-8B-Instruct",
        " Llama_3.1 8B ",
    ],
)
def test_names_are_found_however_they_are_spelled(name: str) -> None:
    assert known_shape(name).name == "Llama-3.1-8B"


def test_instruct_model_with_its_own_window_is_not_its_base() -> None:
    assert known_shape("Qwen2.5-7B-Instruct").window == 32768
    assert known_shape("Qwen2.5-7B").window == 131072


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"did you mean .*Llama-3\.1-8B"):
        shape_from("Llama-3.1-9B")
    with pytest.raises(UserError, match="SmolLM2-135M"):
        shape_from("zzzzzz")


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-4B", "SmolLM2-135M", "Mistral-7B-v0.3", "Qwen2.5-7B"])
def test_parameters_equal_those_of_the_transformers_module(name: str) -> None:
    """The independent reference: transformers builds the layer from its own config class, on the meta device."""
    import torch
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
    from transformers.models.auto import AutoModelForCausalLM

    shape = known_shape(name)
    family = {"Q": Qwen3Config, "M": MistralConfig}.get(name[0], LlamaConfig)
    if name.startswith("Qwen2"):
        family = Qwen2Config
    built = family(
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied_head,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    modules = dict(model.model.layers[0].named_modules())
    for projection in shape.projections:
        block = "self_attn" if projection.name in "qkvo" else "mlp"
        weight = modules[f"{block}.{projection.name}_proj"].weight
        assert tuple(weight.shape) == (projection.outputs, projection.inputs)
    linears = [m.weight.numel() for m in modules.values() if isinstance(m, torch.nn.Linear)]
    assert shape.projection_params == sum(linears)
    assert shape.head_params == model.lm_head.weight.numel()


def test_llama_8b_counts() -> None:
    shape = known_shape("Llama-3.1-8B")
    assert (shape.projection_params, shape.ffn_params, shape.group) == (218_103_808, 176_160_768, 4)
    assert shape.kv_values_per_token == 2048


def test_head_dim_is_read_from_the_config_and_q_and_o_need_not_be_square() -> None:
    given_dim = shape_from_config(config(hidden_size=2560, num_attention_heads=32, head_dim=128), "m")
    q, o = given_dim.projections[0], given_dim.projections[3]
    assert (given_dim.head_dim, q.inputs, q.outputs, o.inputs, o.outputs) == (128, 2560, 4096, 4096, 2560)
    assert shape_from_config(config(hidden_size=2560), "m").head_dim == 80


def test_qwen3_without_head_dim_has_the_default_of_its_family() -> None:
    assert shape_from_config(config(model_type="qwen3", hidden_size=2560), "m").head_dim == 128


def test_head_dim_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="add head_dim"):
        shape_from_config(config(hidden_size=4100), "m")


def test_missing_kv_heads_mean_no_grouping_only_where_the_family_says_so() -> None:
    assert shape_from_config(without("num_key_value_heads"), "m").kv_heads == 32
    with pytest.raises(UserError, match="num_key_value_heads is missing"):
        shape_from_config({**without("num_key_value_heads"), "model_type": "mistral"}, "m")


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, 131072),
        ({"sliding_window": None}, 131072),
        ({"sliding_window": 1 << 20}, 131072),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 32}, 131072),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}, 4096),
    ],
)
def test_an_active_sliding_window_ends_the_account(changes: dict[str, Any], window: int) -> None:
    assert shape_from_config(config(model_type="mistral", **changes), "m").window == window


def test_text_config_of_a_multimodal_model_is_used() -> None:
    assert shape_from_config({"model_type": "wrapper", "text_config": LLAMA_8B}, "m").layers == 32


BAD_VALUES = [0, -1, True, 1.5, 4096.0, float("nan"), float("inf"), "4096", [4096], {}, 10**40]


@pytest.mark.parametrize("value", BAD_VALUES, ids=repr)
@pytest.mark.parametrize(
    "key",
    list(CONFIG_KEYS.values()),
)
def test_an_absurd_dimension_names_model_and_key(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"mymodel: {key}"):
        shape_from_config(config(**{key: value}), "mymodel")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (config(num_key_value_heads=5), "not a multiple of num_key_value_heads 5"),
        (config(tie_word_embeddings="yes"), "tie_word_embeddings"),
        (config(model_type="mamba"), "model_type 'mamba' is not supported"),
        (config(model_type=["llama"]), "is not supported"),
        (config(num_local_experts=8), "num_local_experts is set"),
        (config(kv_lora_rank=512), "kv_lora_rank is set"),
        (config(sliding_window=-1), "sliding_window is -1"),
        (without("hidden_size"), "hidden_size is missing"),
        ({}, "hidden_size is missing"),
        ({"text_config": {}}, "hidden_size is missing"),
    ],
)
def test_a_config_of_another_kind_is_refused(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_from_config(broken, "m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1, 2]", "JSON object"),
        (b"[" * 200_000, "not valid JSON"),
        (b" " * (5 << 20), "too large"),
    ],
    ids=["empty", "cut", "binary", "list", "deep", "huge"],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        shape_from(str(file))


@pytest.mark.parametrize("source", ["", "  ", "a\0b", "nowhere/config.json", "./nowhere", "model.gguf", "x" * 5000])
def test_a_source_that_is_nothing_is_refused(source: str) -> None:
    with pytest.raises(UserError):
        shape_from(source)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no config"):
        shape_from(str(tmp_path))


@given(
    st.dictionaries(
        st.sampled_from([*LLAMA_8B, "head_dim", "sliding_window"]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=5),
            st.lists(st.integers(), max_size=2),
        ),
    )
)
def test_any_config_gives_a_valid_shape_or_a_user_error(changes: dict[str, Any]) -> None:
    try:
        shape = shape_from_config(config(**changes), "m")
    except UserError as error:
        assert str(error).count("\n") == 0 and len(str(error)) < 400
    else:
        assert all(1 <= getattr(shape, field) <= limit for field, limit in LIMITS.items())


def test_every_known_shape_is_consistent() -> None:
    assert len(KNOWN) >= 10
    for shape in KNOWN.values():
        assert shape.heads % shape.kv_heads == 0 and shape.window % 1024 == 0 and isinstance(shape, Shape)
    assert "llama" in FAMILIES
