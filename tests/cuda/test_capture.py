"""What a CUDA graph freezes: launches are configured when bound, and everything that moves is read on the device.

Without a GPU the list of launches stands in for the graph: it, too, is made once and replayed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import kernels
from artifact.engine.decoder import Decoder
from artifact.engine.prepare import Prepared, prepare_synthetic
from artifact.engine.route import Route
from artifact.measure import cells
from artifact.projection.masked import GateMask
from artifact.shapes import Shape
from kernels.cuda import attention, gemv, masked_mlp, sparse_gemv

SHAPE = Shape("tiny", 96, 2, 6, 2, 32, 160, 211, 1024, False)
OPS = ("attention", "gate_up", "gather", "gemv", "masked_mlp", "rope_append", "score", "sparse_gemv", "token")
SHORT, LONG = 64, 448


@pytest.fixture(scope="module")
def prepared(device: torch.device) -> Iterator[Prepared]:
    """A small synthetic model on the Triton kernels, in the interpreter where there is no GPU."""
    patch = pytest.MonkeyPatch()
    if not torch.cuda.is_available():
        for op in OPS:
            patch.setattr(f"kernels.{op}.backend", lambda op, tensor: importlib.import_module(f"kernels.cuda.{op}"))
    yield prepare_synthetic(SHAPE, device.type, torch.float16, 512 + cells.EXTRA_STEPS)
    patch.undo()


def test_autotuning_inside_a_capture_cannot_happen_because_nothing_is_autotuned() -> None:
    folder = Path(kernels.__file__).parent
    found = [
        file.name for file in folder.rglob("*.py") if re.search(r"autotune|do_bench|@\w+\.heuristics", file.read_text())
    ]
    assert not found


def test_launches_are_configured_when_they_are_bound(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration chosen at the first call would be chosen inside a capture."""
    decoder = Decoder(prepared.weights, prepared.cache.share(SHORT), prepared.tokens)

    def late(*_: object) -> None:
        raise AssertionError("configured after binding")

    for module in (attention, gemv, sparse_gemv):
        monkeypatch.setattr(module, "config", late)
    decoder.step()
    assert bool(torch.isfinite(decoder.logits).all())


def test_the_path_of_the_next_token_is_known_when_a_step_ends(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a captured step the look-up rides on its end; what others write to tokens or position counts, too."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(Route, "rides", True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))
    table = torch.zeros(SHAPE.vocab, dtype=torch.bool, device=prepared.tokens.device)
    table[prepared.tokens[SHORT + 2]] = table[3] = table[6] = True
    branch = GateMask(torch.full((SHAPE.layers,), 0.1), table)
    tokens = prepared.tokens.clone()
    decoder = Decoder(prepared.weights, prepared.cache.share(SHORT), tokens, branch)
    decoder.step()
    if torch.cuda.is_available():
        decoder.capture()
    seen = []
    for position in range(SHORT + 1, SHORT + 4):
        assert decoder.cache.tokens == position
        seen.append(decoder.takes_branch())
        assert seen[-1] == bool(table[tokens[position]])
        decoder.step()
    assert set(seen) == {True, False}
    decoder.cache.position.data.fill_(SHORT + 2)  # as the kernels of another decoder write: torch does not notice
    decoder.reset_counts()
    assert decoder.takes_branch()
    decoder.cache.position.data.fill_(SHORT + 4)
    decoder.reset_counts()
    for token in (3, 4, 6):
        tokens[decoder.cache.tokens] = token
        assert decoder.takes_branch() == bool(table[token])
    decoder.cache.set_tokens(SHORT)
    assert decoder.takes_branch() == bool(table[tokens[SHORT]])


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@given(
    rows=st.integers(1, 300_000),
    depth=st.integers(1, 40_000),
    kv_heads=st.integers(1, 128),
    dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    processors=st.integers(1, 256),
    item=st.sampled_from([2, 4]),
)
def test_no_shape_is_left_without_a_configuration(
    rows: int, depth: int, kv_heads: int, dim: int, processors: int, item: int
) -> None:
    for paired in (False, True):
        dense = gemv.config(rows, depth, paired, item)
        assert all(map(is_power_of_two, (dense.rows, dense.block, dense.warps)))
        assert not dense.resident or dense.block >= depth
    sparse = sparse_gemv.config(depth, rows, processors, item)
    assert all(map(is_power_of_two, (sparse.columns, sparse.channels, sparse.warps)))
    split = attention.config(kv_heads, dim, processors, item)
    assert is_power_of_two(split.splits) and 1 <= split.merge <= split.splits
    assert split.block * item == attention.config(kv_heads, dim, processors).block * 2
    masked = masked_mlp.config(depth, processors, item)
    assert all(map(is_power_of_two, (masked.block, masked.warps))) and masked.programs >= processors


def test_a_step_captured_at_a_short_context_equals_an_eager_one_at_a_long_context(prepared: Prepared) -> None:
    """Lengths, positions and tokens that were baked in at the capture would give the short context's logits."""
    replayed = Decoder(prepared.weights, prepared.cache.share(SHORT), prepared.tokens)
    replayed.step()
    eager = Decoder(prepared.weights, prepared.cache.share(LONG), prepared.tokens)  # sees what the first one appended
    eager.step()
    if prepared.weights.device.type == "cuda":
        replayed.capture()
    short = replayed.logits.clone()
    replayed.cache.set_tokens(LONG)
    replayed.step()
    assert torch.equal(replayed.logits, eager.logits)
    assert not torch.equal(replayed.logits, short)
    assert replayed.cache.tokens == LONG + 1
