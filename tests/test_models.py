"""Loading weights: layouts, fused order, types on disk, shards, and everything a tensor can have wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from artifact.engine import models
from artifact.errors import UserError
from artifact.shapes import Shape
from tests.inputs import NAN
from tests.models_fixture import MODELS, VOCAB, Loaded

Tiny = Callable[[str], Loaded]
Tensors = dict[str, torch.Tensor]
Q, K, NORM = (
    f"model.layers.1.{n}" for n in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "input_layernorm.weight")
)


def altered(loaded: Loaded, folder: Path, change: Callable[[Tensors], None]) -> Path:
    """Copy a checkpoint with its tensors changed."""
    path = folder / "altered"
    shutil.copytree(loaded.path, path)
    tensors = load_file(str(path / "model.safetensors"))
    change(tensors)
    save_file(tensors, str(path / "model.safetensors"))
    return path


def _drop(ending: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ending in name]:
            del tensors[name]

    return change


def _set(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value(tensors[name]).contiguous()})


def _spoil(name: str, *numbers: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[5 : 5 + len(numbers)] = torch.tensor(numbers)

    return change


@pytest.mark.parametrize("name", MODELS)
def test_both_layouts_hold_the_numbers_of_the_file_in_fused_order(tiny: Tiny, name: str) -> None:
    loaded = tiny(name)
    state, weights = loaded.model.state_dict(), loaded.weights
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(weights.head, state["lm_head.weight"])
    assert torch.equal(weights.final_norm, state["model.norm.weight"])
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        for matrix, parts in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.o, ("self_attn.o_proj",)),
            (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.down, ("mlp.down_proj",)),
        ):
            assert torch.equal(matrix.w, torch.cat([state[f"{prefix}.{part}.weight"] for part in parts]))
            assert torch.equal(matrix.w_in, matrix.w.T) and matrix.w_in.is_contiguous()
            biases = [state[f"{prefix}.{part}.bias"] for part in parts if f"{prefix}.{part}.bias" in state]
            assert (matrix.bias is None) == (not biases)
            assert matrix.bias is None or torch.equal(matrix.bias, torch.cat(biases))
        assert torch.equal(layer.attention_norm, state[f"{prefix}.input_layernorm.weight"])
        assert torch.equal(layer.mlp_norm, state[f"{prefix}.post_attention_layernorm.weight"])
        assert (layer.q_norm is not None) == (layer.k_norm is not None) == (MODELS[name].family == "qwen3")


def test_fault_19_head_dim_is_a_dimension_of_its_own(tiny: Tiny) -> None:
    weights = tiny("qwen3").weights
    assert (weights.shape.hidden, weights.shape.heads, weights.shape.head_dim) == (96, 3, 64)
    assert weights.layers[0].o.w.shape == (96, 192) and weights.layers[0].qkv.w.shape == (320, 96)


def test_fault_27_a_tied_head_is_missing_from_the_file_and_one_tensor_in_memory(tiny: Tiny) -> None:
    tied, untied = tiny("llama-tied"), tiny("llama")
    assert "lm_head.weight" not in load_file(str(tied.path / "model.safetensors"))
    assert tied.weights.head.data_ptr() == tied.weights.embedding.data_ptr() and tied.weights.shape.tied_head
    assert not torch.equal(untied.weights.head, untied.weights.embedding)


def test_fault_27_a_tied_head_that_the_config_does_not_mention_loads(tiny: Tiny, tmp_path: Path) -> None:
    path = altered(tiny("llama"), tmp_path, _drop("lm_head"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "tie_word_embeddings"}))
    weights = models.load(str(path))
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


def test_fault_27_a_head_lost_from_an_untied_checkpoint_is_not_replaced_by_the_embedding(
    tiny: Tiny, tmp_path: Path
) -> None:
    path = altered(tiny("llama"), tmp_path, _drop("lm_head"))
    with pytest.raises(UserError, match=r"lacks lm_head.weight, which its config.json does not tie"):
        models.load(str(path))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load_as_float32(tiny: Tiny, tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = tiny("qwen2")
    path = altered(loaded, tmp_path, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    weights = models.load(str(path))
    assert weights.dtype == torch.float32
    assert torch.equal(weights.layers[2].down.w, loaded.weights.layers[2].down.w.to(dtype).float())
    bias = loaded.weights.layers[0].qkv.bias
    assert bias is not None and torch.equal(weights.layers[0].qkv.bias, bias.to(dtype).float())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_can_be_held_in_half_precision_with_norms_in_float32(tiny: Tiny, dtype: torch.dtype) -> None:
    loaded = tiny("qwen3")
    weights = models.load(str(loaded.path), dtype=dtype)
    layer = weights.layers[0]
    assert weights.dtype == layer.qkv.w.dtype == layer.qkv.w_in.dtype == weights.head.dtype == dtype
    assert layer.q_norm is not None and layer.q_norm.dtype == layer.attention_norm.dtype == torch.float32
    assert torch.equal(layer.qkv.w, loaded.weights.layers[0].qkv.w.to(dtype))


def test_shards_load_as_one_file_does(tiny: Tiny, tmp_path: Path) -> None:
    loaded = tiny("llama")
    path = tmp_path / "sharded"
    loaded.model.save_pretrained(path, max_shard_size="300KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2 and not (path / "model.safetensors").exists()
    weights = models.load(str(path))
    assert torch.equal(weights.head, loaded.weights.head)
    for one, other in zip(weights.layers, loaded.weights.layers, strict=True):
        assert torch.equal(one.qkv.w, other.qkv.w) and torch.equal(one.gate_up.w_in, other.gate_up.w_in)


INF = float("inf")
WRONG = [
    ("llama", _drop(K), rf"lacks the tensor {K}"),
    ("llama", _set(Q, lambda t: t[:-1]), r"q_proj.weight has shape \(191, 96\), config.json implies \(192, 96\)"),
    ("llama", _set(Q, lambda t: t.T), r"q_proj.weight has shape \(96, 192\)"),
    ("llama", _spoil(Q, NAN), "q_proj.weight holds NaN or infinite numbers"),
    ("llama", _spoil(NORM, INF), "input_layernorm.weight holds NaN or infinite"),
    ("llama", _spoil("lm_head.weight", INF, -INF), "lm_head.weight holds NaN or infinite"),
    ("llama", _set(Q, lambda t: t.to(torch.int8)), "stored as torch.int8; pass a checkpoint that is not quantized"),
    ("llama", _set(Q, lambda t: t.to(torch.float8_e4m3fn)), "stored as torch.float8_e4m3fn"),
    ("llama", lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(152)}), "biases in its gated MLP"),
    ("qwen2", _drop("1.self_attn.k_proj.bias"), "lacks the tensor model.layers.1.self_attn.k_proj.bias"),
    ("qwen2", _drop("bias"), "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
    ("llama-biased", _drop("bias"), "lacks the tensor model.layers.0.self_attn.q_proj.bias"),
    ("qwen3", _drop("q_norm"), "lacks the tensor model.layers.0.self_attn.q_norm"),
]


@pytest.mark.parametrize(("name", "change", "words"), WRONG)
def test_what_a_tensor_has_wrong_is_one_sentence(
    tiny: Tiny, tmp_path: Path, name: str, change: Callable[[Tensors], None], words: str
) -> None:
    path = altered(tiny(name), tmp_path, change)
    with pytest.raises(UserError, match=words) as error:
        models.load(str(path))
    assert "\n" not in str(error.value) and str(tmp_path) not in str(error.value)


def test_numbers_too_large_for_the_wanted_type_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = altered(tiny("llama"), tmp_path, _spoil(Q, 1e5))
    models.load(str(path))
    with pytest.raises(UserError, match=r"NaN or infinite numbers in torch.float16"):
        models.load(str(path), dtype=torch.float16)


def test_held_weights_are_handed_out_and_others_are_loaded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_held", {})
    monkeypatch.setattr(models, "_tokenizers", {})
    source = str(tiny("llama").path)
    shape = tiny("llama").weights.shape
    size = 2 * 4 * (shape.layers * shape.projection_params + shape.head_params)
    assert not models.hold(source, torch.float32, size - 1) and not models._held
    assert models.hold(source, torch.float32, size)
    held = models.load(source)
    assert held is models.load(source) and all("w_in" in layer.down.__dict__ for layer in held.layers)
    assert models.load(source, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert models.load(str(tiny("qwen3").path)).identity != held.identity


def test_the_tokenizer_of_held_weights_is_loaded_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.test_prompts import tokenizer

    monkeypatch.setattr(models, "_held", {})
    monkeypatch.setattr(models, "_tokenizers", {})
    copy = tmp_path / "model"
    shutil.copytree(tiny("llama").path, copy)
    tokenizer(adds_bos=False).save_pretrained(str(copy))
    assert models.load_tokenizer(str(copy)) is not models.load_tokenizer(str(copy))
    assert models.hold(str(copy), torch.float32, 1 << 30)
    assert models.load_tokenizer(str(copy)) is models.load_tokenizer(str(copy))


def test_synthetic_weights_have_the_exact_shape_and_the_scale_of_trained_ones() -> None:
    shape = Shape("test", 96, 2, 9, 3, 64, 152, 311, 512, False)
    weights = models.synthetic(shape, "cpu", torch.float32)
    layer = weights.layers[1]
    assert layer.qkv.w.shape == (15 * 64, 96) and layer.o.w.shape == (96, 576)
    assert layer.gate_up.w.shape == (304, 96) and layer.down.w.shape == (96, 152)
    assert torch.equal(layer.down.w_in, layer.down.w.T) and weights.head.shape == (311, 96)
    assert float(layer.qkv.w.std()) == pytest.approx(96**-0.5, rel=0.05)
    again, other = models.synthetic(shape, "cpu", torch.float32), models.synthetic(shape, "cpu", torch.float32, 1)
    assert torch.equal(again.head, weights.head) and not torch.equal(other.head, weights.head)
    assert again.identity == weights.identity != other.identity


def test_a_missing_tokenizer_is_one_sentence(tiny: Tiny) -> None:
    with pytest.raises(UserError, match=r"llama holds no usable tokenizer .*; add tokenizer.json"):
        models.load_tokenizer(str(tiny("llama").path))


def test_a_tokenizer_of_another_model_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """A token that has no embedding would read past the weights."""
    from tests.test_prompts import tokenizer

    copy = tmp_path / "model"
    shutil.copytree(tiny("llama").path, copy)
    own = tokenizer(adds_bos=False)
    own.save_pretrained(str(copy))
    assert len(models.load_tokenizer(str(copy))) < VOCAB
    own.add_tokens([f"<{i}>" for i in range(VOCAB)])
    own.save_pretrained(str(copy))
    with pytest.raises(UserError, match=f"knows token 568, its weights {VOCAB} tokens"):
        models.load_tokenizer(str(copy))
