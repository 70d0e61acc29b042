"""Opening checkpoints: damaged files and models that are not supported end in one sentence, and no pickle is read."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from artifact.engine import models
from artifact.engine.checkpoints import open_checkpoint
from artifact.errors import UserError
from tests.models_fixture import Loaded

Tiny = Callable[[str], Loaded]


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Path:
    """A healthy checkpoint to damage."""
    path = tmp_path / "model"
    shutil.copytree(tiny("llama").path, path)
    return path


def configured(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps(config))
    return path


def sentence(source: Path | str) -> str:
    """Load and return the user error's text; anything else that is raised fails the test."""
    with pytest.raises(UserError) as error:
        models.load(str(source))
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    return text


class _Armed:
    """A pickle that leaves a mark when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(Path.cwd() / "armed"), "w"))


def test_only_a_pickle_is_refused_and_never_loaded(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(_Armed()))
    assert "only pytorch_model.bin, a pickle that is never loaded" in sentence(copy)
    # Nor under the name of a weight file, nor beside one.
    (copy / "model.safetensors").write_bytes((copy / "pytorch_model.bin").read_bytes())
    assert "cannot be read as safetensors" in sentence(copy)
    assert not (tmp_path / "armed").exists()


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(copy: Path, kept: float) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(kept * len(data))])
    assert "model.safetensors cannot be read as safetensors" in sentence(copy)


def test_a_damaged_header_is_named(copy: Path) -> None:
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:60] = b"\xff" * 52
    file.write_bytes(bytes(data))
    assert "cannot be read as safetensors" in sentence(copy)


def test_a_missing_shard_is_named(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    tiny("llama").model.save_pretrained(path, max_shard_size="300KB")
    victim = sorted(path.glob("model-*.safetensors"))[1]
    data = victim.read_bytes()
    victim.write_bytes(data[: len(data) // 2])
    assert f"{victim.name} cannot be read as safetensors" in sentence(path)
    victim.unlink()
    assert f"lacks {victim.name} (1 weight files missing)" in sentence(path)
    for broken in ("{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": []}'):
        (path / "model.safetensors.index.json").write_text(broken)
        assert "is not a weight index" in sentence(path)


def test_an_index_that_promises_what_a_shard_lacks(copy: Path) -> None:
    names = list(open_checkpoint(str(copy)).files)
    table = {"weight_map": dict.fromkeys([*names, "model.layers.3.mlp.down_proj.weight"], "model.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(table))
    configured(copy, num_hidden_layers=4)
    assert "lacks the tensor model.layers.3" in sentence(copy)


def test_an_index_cannot_point_outside_its_directory(copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    shutil.copy(copy / "model.safetensors", outside)
    names = list(open_checkpoint(str(copy)).files)
    (copy / "model.safetensors").unlink()
    table = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(table))
    assert "lacks outside.safetensors" in sentence(copy)


@pytest.mark.parametrize("text", ["", "{", "\x00\x01", '{"model_type": "llama"', "[]", '"llama"', "null"])
def test_a_config_that_is_not_a_json_object(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    found = sentence(copy)
    assert "config.json" in found and "fetch the checkpoint again" in found


def test_a_config_of_bytes_that_are_no_text(copy: Path) -> None:
    (copy / "config.json").write_bytes(b"\xff\xfe\x80{")
    assert "is not readable JSON" in sentence(copy)


def test_no_config_no_weights_no_directory(copy: Path, tmp_path: Path) -> None:
    assert "neither a Hugging Face directory nor a .gguf file" in sentence(tmp_path / "nowhere")
    assert "neither a Hugging Face directory" in sentence("meta-llama/Llama-3.1-8B")
    assert "neither a Hugging Face directory" in sentence(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    assert "holds no weights" in sentence(copy)
    (copy / "config.json").unlink()
    assert "holds no config.json" in sentence(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox' checkpoint; supported architectures are llama, mistral, qwen2, qwen3"),
        ({"model_type": "mixtral"}, "'mixtral'"),
        ({"model_type": None}, "'None'"),
        ({"model_type": ["llama"]}, "llama"),
        ({"hidden_act": "gelu"}, "uses activation 'gelu'"),
        ({"hidden_act": None}, "uses activation None"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope scaling 'su'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 2}, "not a multiple of num_key_value_heads"),
        ({"hidden_size": 97}, r"has shape \(311, 96\), config.json implies \(311, 97\)"),
        ({"head_dim": 32}, "has shape"),
        ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding window of 64 tokens"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, "sliding window of 64 tokens"),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, "sliding window of 64"),
        ({"num_experts": 8}, "num_experts is set"),
    ],
)  # fmt: skip
def test_fault_27_a_model_that_would_be_another_is_refused_by_name(
    copy: Path, changes: dict[str, Any], words: str
) -> None:
    assert re.search(words, sentence(configured(copy, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 64, "use_sliding_window": False},
        {"sliding_window": 64, "layer_types": ["full_attention"] * 3},
        {"model_type": "mistral", "sliding_window": None},
    ],
)
def test_a_window_that_is_switched_off_is_no_obstacle(copy: Path, changes: dict[str, Any]) -> None:
    assert open_checkpoint(str(configured(copy, **changes))).shape.window == 512


def test_the_identity_follows_config_and_weights(copy: Path, tiny: Tiny) -> None:
    before = open_checkpoint(str(copy)).identity
    assert open_checkpoint(str(copy)).identity == before and len(before) == 16
    configured(copy, rms_norm_eps=1e-4)
    changed = open_checkpoint(str(copy)).identity
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.write((copy / "model.safetensors").read_bytes()[:8])
    assert len({before, changed, open_checkpoint(str(copy)).identity}) == 3
