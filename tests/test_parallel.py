"""A decode step split over two ranks equals one rank, and the ranks' bytes add up to those of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_ranks import CONTEXT, STEPS, whole

from artifact.account import Mode, Setting, step_bytes
from artifact.engine import parallel
from artifact.engine.decoder import Decoder
from artifact.errors import UserError
from artifact.shapes import known_shape
from tests.models_fixture import MODELS, Tiny, saved

TESTS = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("one_thread")


def ranks(model: Path, r_p: float, folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """What every rank wrote, each a process of its own."""
    outs = [folder / f"rank-{i}.json" for i in range(size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(TESTS / "parallel_ranks.py"), str(model)]
    started = [
        subprocess.Popen(
            [*command, str(i), str(size), str(folder / "store"), str(r_p), str(out)], env=environment,
            stderr=subprocess.PIPE, text=True,
        )
        for i, out in enumerate(outs)
    ]  # fmt: skip
    for one in started:
        _, errors = one.communicate()
        assert one.returncode == 0, errors[-2000:]
    return [json.loads(out.read_text()) for out in outs]


EVEN = {"vocab_size": 312, "num_attention_heads": 4, "num_key_value_heads": 2}
# The biases of q, k and v are split, that of o is added once; Qwen3 has norms on heads, which are whole on every rank.
SPLIT = {
    "llama": Tiny("llama", {"attention_bias": True, **EVEN}),
    "qwen3": Tiny("qwen3", {"tie_word_embeddings": True, **EVEN}),
}


@pytest.mark.parametrize(("name", "r_p"), [("llama", 0.5), ("qwen3", 1.0)])
def test_two_ranks_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, r_p: float) -> None:
    monkeypatch.setitem(MODELS, "even", SPLIT[name])
    _, model = saved("even", tmp_path)
    weights, tokens, cache, branch = whole(str(model), r_p)
    one = Decoder(weights, cache.fork(CONTEXT, CONTEXT + STEPS + 1), tokens, branch)  # type: ignore[attr-defined]
    found = ranks(model, r_p, tmp_path)
    for step in range(STEPS):
        one.step()
        for rank in found:
            logits = torch.tensor(rank["logits"][step])
            assert float((logits - one.logits).norm() / one.logits.norm()) < 1e-5
    counted = one.counted()
    for name_of in ("projection_bytes", "kv_bytes", "head_bytes"):
        parts = [rank["counted"][name_of] for rank in found]
        assert sum(parts) == pytest.approx(getattr(counted, name_of), rel=1e-9)
        assert r_p < 1 or parts[0] == parts[1]
    assert (counted.r_p < 1) == (r_p < 1)


def test_the_account_of_a_rank_is_its_share_of_the_model() -> None:
    """Llama-3.1-70B on two GPUs: each reads half of every term, so the crossing stays where it is, beyond 128K."""
    shape, setting = known_shape("Llama-3.1-70B"), Setting(r_p=0.5, r_kv=0.3)
    half = parallel.local_shape(shape, 2)
    for mode in Mode:
        assert 2 * step_bytes(half, setting, 131072, mode) == step_bytes(shape, setting, 131072, mode)


@pytest.mark.parametrize("size", [3, 16])
def test_heads_that_do_not_divide_are_one_sentence(size: int) -> None:
    with pytest.raises(UserError, match=f"does not divide over {size} ranks"):
        parallel.local_shape(known_shape("Llama-3.1-70B"), size)
