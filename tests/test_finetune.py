"""Fine-tuning on a tiny model: the forward pass is the mask's, thresholds stay, the engine runs what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from artifact.engine import teacher
from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.measure import finetune
from artifact.measure.finetune import Recipe
from artifact.projection.lora import AdaptedMask, load_adapter
from artifact.projection.masked import GateMask
from tests.inputs import relative
from tests.masked_model import Masked, logits
from tests.models_fixture import Loaded, token_ids
from tests.tolerances import LOGITS

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = torch.tensor([0.25, 0.1, 0.4])
RECIPE = Recipe(rank=2, alpha=6, learning_rate=0.02, sequence=16, batch=2, steps=12, warmup=2)


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("adapters") / "one"
    text = token_ids(8, seed=2).repeat(60)  # eight tokens over and over: easily learnt
    return out, finetune.finetune(str(tiny("llama").path), LIMITS, text, RECIPE, out, {"text": "made up"})


def test_the_forward_pass_that_is_trained_is_the_mask(tiny: Tiny) -> None:
    """Every token is masked, the first one included, as in the paper's evaluation."""
    loaded, ids = tiny("llama"), token_ids(40)
    expected, _ = logits(loaded.model, ids, Masked(0, LIMITS))
    with torch.inference_mode():
        found = finetune.load_masked(str(loaded.path), LIMITS, "cpu", torch.float32).eval()(ids[None]).logits[0]
        assert relative(found, loaded.model(ids[None]).logits[0]) > 1e-2
    assert relative(found, expected) < LOGITS


def test_training_lowers_the_loss_of_the_sparse_model_and_says_how(trained: tuple[Path, dict]) -> None:
    out, record = trained
    assert sum(record["losses"][-3:]) < 0.8 * sum(record["losses"][:3])
    assert record["steps_done"] == 12 and record["tokens_seen"] == 12 * 32
    assert finetune.read_record(out) == record
    assert record["limits"] == LIMITS.tolist() and record["recipe"]["rank"] == 2
    assert "/" not in json.dumps(json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"])


def test_the_engine_runs_what_peft_trained(tiny: Tiny, trained: tuple[Path, dict]) -> None:
    """The saved adapter on peft's own model and on the engine: same hidden states, scale alpha / r included."""
    import peft

    loaded, ids = tiny("llama"), token_ids(40)
    out, _ = trained
    adapter = load_adapter(out)
    assert adapter.rank == 2 and float(adapter.layers[0].gate[1].abs().max()) > 0
    # With nothing dropped, prefill's dense first token is the only difference; drop it by adapting it away.
    model = finetune.load_masked(str(loaded.path), LIMITS * 0 - 1, "cpu", torch.float32)
    with torch.inference_mode():
        adapted = peft.PeftModel.from_pretrained(model, str(out)).eval()
        first = prefill(loaded.weights, ids[:1]).cache
        got = teacher.forward(loaded.weights, first, ids[1:], AdaptedMask(GateMask(LIMITS * 0 - 1), adapter)).hidden
        # A causal model whose first row is the base model's: adapt the rows after it only.
        expected = _first_row_base(adapted, ids)
    assert relative(teacher.logits(loaded.weights, got), expected[1:]) < LOGITS


def _first_row_base(adapted: object, ids: torch.Tensor) -> torch.Tensor:
    """Logits (n, V) of the adapted model whose first row skips the adapter."""
    handles = []
    for _, module in adapted.named_modules():  # type: ignore[attr-defined]
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            base = module.base_layer

            def restore(
                _module: object, inputs: tuple, output: torch.Tensor, base: torch.nn.Module = base
            ) -> torch.Tensor:
                return torch.cat((base(inputs[0][:, :1]), output[:, 1:]), dim=1)

            handles.append(module.register_forward_hook(restore))
    try:
        return adapted(ids[None]).logits[0]  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()


def test_only_the_adapter_is_trained(tiny: Tiny, trained: tuple[Path, dict]) -> None:
    names = load_file(str(trained[0] / "adapter_model.safetensors"))
    assert len(names) == 3 * 3 * 2 and all("lora_" in name and ".mlp." in name for name in names)
    model = finetune.load_masked(str(tiny("llama").path), LIMITS, "cpu", torch.float32)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_time_ends_training_as_steps_do(tiny: Tiny, tmp_path: Path) -> None:
    recipe = Recipe(rank=2, sequence=16, batch=1, steps=10**6, minutes=1e-4)
    record = finetune.finetune(str(tiny("llama").path), LIMITS, token_ids(64), recipe, tmp_path / "short", {})
    assert 1 <= record["steps_done"] < 10**5


def test_what_cannot_be_trained_or_loaded_is_one_sentence(
    tiny: Tiny, trained: tuple[Path, dict], tmp_path: Path
) -> None:
    path = str(tiny("llama").path)
    with pytest.raises(UserError, match="a batch needs 2"):
        finetune.batches_of(token_ids(20), RECIPE)
    with pytest.raises(UserError, match="gate limits for 2 layers"):
        finetune.load_masked(path, LIMITS[:2], "cpu", torch.float32)
    with pytest.raises(UserError, match="learning rate is 0"):
        Recipe(learning_rate=0.0)
    with pytest.raises(UserError, match="no readable adapter"):
        load_adapter(tmp_path)
    assert finetune.read_record(tmp_path) is None
    for name, change in (("attention", "self_attn.q_proj"), ("gate", None)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text((trained[0] / "adapter_config.json").read_text())
        tensors = load_file(str(trained[0] / "adapter_model.safetensors"))
        if change is None:
            tensors = {key: value for key, value in tensors.items() if "gate_proj" not in key}
        else:
            tensors = {key.replace("mlp.gate_proj", change): value for key, value in tensors.items()}
        save_file(tensors, str(folder / "adapter_model.safetensors"))
        with pytest.raises(UserError, match=r"only LoRA on gate, up and down|adapt gate, up and down"):
            load_adapter(folder)


def test_batches_hold_every_sequence_once() -> None:
    found = finetune.batches_of(torch.arange(16 * 7), Recipe(sequence=16, batch=3))
    assert found.shape == (2, 3, 16)
    starts = found[:, :, 0].flatten().tolist()
    assert len(set(starts)) == 6 and all(start % 16 == 0 for start in starts)
