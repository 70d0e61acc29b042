"""GGUF files, written here as llama.cpp writes them: converted to the same model, or refused in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from artifact.engine import gguf_file, models
from artifact.engine.checkpoints import open_checkpoint
from artifact.engine.prefill import logits, prefill
from artifact.errors import UserError
from tests.inputs import relative
from tests.models_fixture import MODELS, Loaded, Tiny, build, token_ids
from tests.tolerances import LOGITS

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
PUBLISHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, "output.weight")
    _, _, layer, part = name.split(".", 3)
    stem, ending = part.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[stem]}.{ending}"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows of a head from halves to pairs: llama.cpp rotates neighbours for this architecture."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write(
    model: Any,
    architecture: str,
    file: Path,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    extra: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write a transformers model as a float32 GGUF with a small byte-level tokenizer."""
    import gguf

    config, state = model.config, dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    if architecture == "llama":
        for name in state:
            heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(name.split("_proj")[0][-1])
            if "_proj" in name and heads and "self_attn" in name:
                state[name] = interleaved(state[name], heads)
    tensors = {gguf_name(name): value for name, value in state.items()}
    change(tensors)
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if architecture == "llama" else "qwen2")
    writer.add_token_list(["a", "b", "ab"] + [f"<{i}>" for i in range(3, config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    extra(writer)
    for name, value in tensors.items():
        writer.add_tensor(name, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    monkeypatch.setenv("ARTIFACT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def agrees(file: Path, model: Any) -> bool:
    weights, ids = models.load(str(file)), token_ids(100)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    return relative(logits(weights, prefill(weights, ids).hidden), expected) < LOGITS


def refusal(file: Path) -> str:
    with pytest.raises(UserError) as error:
        models.load(str(file))
    text = str(error.value)
    assert file.name in text and "\n" not in text
    assert not list((file.parent / "data").glob("converted/*/complete"))
    return text


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_a_gguf_is_the_model_it_was_written_from(tiny: Callable[[str], Loaded], tmp_path: Path, name: str) -> None:
    model = tiny(name).model
    file = write(model, MODELS[name].family, tmp_path / "tiny.gguf")
    assert agrees(file, model)
    checkpoint = open_checkpoint(str(file))
    assert checkpoint.shape.tied_head == (name in ("llama-tied", "qwen3"))
    assert checkpoint.identity == (checkpoint.folder / "complete").read_text()[:16]


def test_the_second_use_reads_the_conversion(
    tiny: Callable[[str], Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tiny("llama").model, "llama", tmp_path / "tiny.gguf")
    first = open_checkpoint(str(file)).folder
    monkeypatch.setattr(gguf_file, "_convert", lambda *_: pytest.fail("converted again"))
    assert open_checkpoint(str(file)).folder == first
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name]


def test_a_file_is_hashed_once_until_it_is_written_anew(
    tiny: Callable[[str], Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tiny("llama").model, "llama", tmp_path / "tiny.gguf")
    first = open_checkpoint(str(file))
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
        assert open_checkpoint(str(file)).identity == first.identity
    content, status = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1  # of the same size, in place, a moment later
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert open_checkpoint(str(file)).identity != first.identity


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_fault_27_rope_scaling_in_a_gguf_is_applied(tmp_path: Path, kind: str) -> None:
    import gguf

    parameters = {"rope_type": kind, "rope_theta": 500000.0, **(PUBLISHED if kind == "llama3" else {"factor": 4.0})}
    MODELS["scaled"] = Tiny("llama", {"rope_parameters": parameters})
    try:
        model = build("scaled")
    finally:
        del MODELS["scaled"]

    def extra(writer: Any) -> None:
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(4.0)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if kind == "llama3":
            plain = 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
            tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.double()).float()

    file = write(model, "llama", tmp_path / "tiny.gguf", change, extra)
    assert agrees(file, model)
    # Without the scaling it is visibly another model: the test would notice.
    assert not agrees(write(model, "llama", tmp_path / "plain.gguf"), model)


def test_fault_27_other_scalings_in_a_gguf_are_refused(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    import gguf

    model = tiny("llama").model
    yarn = write(
        model, "llama", tmp_path / "a.gguf", extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    )
    assert "rope scaling 'yarn'" in refusal(yarn)
    factors = write(
        model, "llama", tmp_path / "b.gguf", lambda t: t.update({"rope_freqs.weight": torch.linspace(1, 3, 32)})
    )
    assert "not Llama 3's" in refusal(factors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "lacks the tensor blk.1.ffn_up.weight (1 missing)"),
        (lambda t: t.pop("token_embd.weight"), "lacks the tensor token_embd.weight"),
        (lambda t: t.update({"blk.0.attn_q.bias": torch.zeros(192)}), "holds blk.0.attn_q.bias"),
        (lambda t: t.update({"blk.0.ffn_gate_exps.weight": torch.zeros(2, 3)}), "holds blk.0.ffn_gate_exps.weight"),
    ],
)
def test_missing_and_foreign_tensors_are_named(
    tiny: Callable[[str], Loaded], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    assert words in refusal(write(tiny("llama").model, "llama", tmp_path / "tiny.gguf", change))


def test_another_architecture_is_named(tiny: Callable[[str], Loaded], tmp_path: Path) -> None:
    file = write(tiny("llama").model, "gemma2", tmp_path / "tiny.gguf")
    assert "holds a 'gemma2' model; supported architectures are llama, mistral, qwen2, qwen3" in refusal(file)


@pytest.mark.parametrize("kept", [0, 3, 100, 20_000, -200_000, -1])
def test_a_cut_file_is_one_sentence(tiny: Callable[[str], Loaded], tmp_path: Path, kept: int) -> None:
    whole = write(tiny("llama").model, "llama", tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:kept])
    assert "is not a readable GGUF file" in refusal(cut)


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    file.write_text("this is not it" * 100)
    assert "is not a readable GGUF file" in refusal(file)
