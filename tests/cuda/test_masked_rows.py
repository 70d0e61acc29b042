"""The streaming form of the masked up projection: its launch configurations everywhere, its numbers on a GPU that runs
it. What it must compute is tested for the Triton form, on any machine, in test_masked_mlp.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from kernels import masked_mlp as op
from kernels.cuda import masked_rows, nvrtc
from kernels.cuda.masked_rows import PIECE, WIDEST, Config
from kernels.masked_mlp import LowRank
from kernels.norm import Norm
from tests.cuda.compiler import needs_compiler, static_bytes
from tests.cuda.test_masked_mlp import TOLERANCE, low_rank, nan_passes_and_a_dropped_row_is_never_read, wide
from tests.cuda.test_projections import draw, error, normed
from tests.cuda.test_sparse_rows import needs_gpu


def test_the_models_of_the_papers_are_taken() -> None:
    assert masked_rows.config(4096) == Config(16, 4, 4)  # Llama-3.1-8B, Qwen3-8B, Mistral-7B
    assert masked_rows.config(3072) == Config(15, 3, 4)  # Llama-3.2-3B
    assert masked_rows.config(8192) == Config(16, 8, 4)
    assert masked_rows.config(576) is None  # SmolLM2: rows of two and a quarter pieces


@given(st.integers(1, 40_000))
def test_warps_cover_a_row_once_or_not_at_all(depth: int) -> None:
    c = masked_rows.config(depth)
    if c is None:
        assert depth % PIECE or depth // PIECE > 16
        return
    vectors, rest = divmod(depth, PIECE * c.pieces)
    assert rest == 0 and 1 <= vectors <= WIDEST
    assert c.warps % c.pieces == 0 and c.warps <= 16


def test_what_it_does_not_take_is_left_to_triton() -> None:
    x, w = torch.zeros(256), torch.zeros(64, 256, dtype=torch.float16)
    assert not masked_rows.takes(x, w, None, None)  # a CPU tensor


def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of the CPU pass for those of a GPU of four multiprocessors."""
    monkeypatch.setattr(nvrtc, "overlaps", lambda tensor: True)
    monkeypatch.setattr(nvrtc, "missing", lambda device: "")


def test_factors_of_the_weights_type_or_float32_are_taken_and_no_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form with separate products hands over float32 sums; read as half precision they were noise."""
    on(monkeypatch)
    x, w = torch.zeros(256), torch.zeros(64, 256, dtype=torch.bfloat16)
    half, single = (torch.zeros(64, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert masked_rows.takes(x, w, None, LowRank(half, half, half))
    assert masked_rows.takes(x, w, None, LowRank(single, single, single))
    assert not masked_rows.takes(x, w, None, LowRank(single, half, half))
    other = half.to(torch.float16)
    assert not masked_rows.takes(x, w, None, LowRank(other, other, other))


def bound(
    monkeypatch: pytest.MonkeyPatch, w: torch.Tensor, norm: Norm | None, low: LowRank | None, *chosen: Config
) -> tuple[nvrtc.Source, nvrtc.Shape, tuple[torch.Tensor, ...]]:
    """What a projection by w (N, K) would launch on a GPU of four multiprocessors."""
    on(monkeypatch)
    found: list[Any] = []
    monkeypatch.setattr(nvrtc, "bind", lambda *arguments: found.append(arguments))
    rank = 0 if low is None else low.rank
    gate, x, act = torch.zeros(w.shape[0] + 2 * rank), torch.zeros(w.shape[1]), torch.zeros(w.shape[0] + rank)
    masked_rows.bind(gate, x, w, act, torch.zeros(1), torch.zeros(1, dtype=torch.int32), norm, low, *chosen)
    source, shape, tensors, _ = found[0]
    return source, shape, tensors


@needs_compiler
@pytest.mark.parametrize(("rank", "normed"), [(0, False), (0, True), (1, False), (16, True), (99, True)])
def test_the_compiler_finds_the_shared_memory_that_is_counted(
    rank: int, normed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The scratch of an update's sums was there twice: at rank 99 a block of Llama-3.1-8B did not compile."""
    low = LowRank(*(torch.zeros(436, rank, dtype=torch.float16) for _ in range(3))) if rank else None
    norm = Norm(torch.ones(4096), 1e-5) if normed else None
    source, shape, _ = bound(monkeypatch, torch.zeros(436, 4096, dtype=torch.float16), norm, low)
    counted = masked_rows.shared_bytes(Config(16, 4, 4), 109, rank, normed)
    assert static_bytes(source.file, dict(source.macros), tmp_path) == counted <= masked_rows.MOST_SHARED_BYTES
    assert shape.shared_bytes == 0


@pytest.mark.parametrize("chosen", [(), (Config(16, 1, 4),)])
def test_what_is_refused_cannot_be_bound(chosen: tuple[Config, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 weights and factors of several types were read as half precision."""
    w = torch.zeros(64, 256, dtype=torch.float16)
    half, single = (torch.zeros(64, 2, dtype=dtype) for dtype in (torch.float16, torch.float32))
    bound(monkeypatch, w, None, LowRank(half, half, half), *chosen)
    bound(monkeypatch, w, None, LowRank(single, single, single), *chosen)
    with pytest.raises(ValueError, match="not float16 or bfloat16"):
        bound(monkeypatch, w.float(), None, None, *chosen)
    with pytest.raises(ValueError, match="factors of the update"):
        bound(monkeypatch, w, None, LowRank(single, half, half), *chosen)
    with pytest.raises(ValueError, match="rows of 260 weights"):
        bound(monkeypatch, torch.zeros(64, 260, dtype=torch.float16), None, None, *chosen)
    with pytest.raises(ValueError, match="rows of a block"):
        bound(monkeypatch, torch.zeros(1, dtype=torch.float16).expand(4 * 513, 256), None, None, *chosen)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "depth"), [(7, 256), (1000, 1280), (2000, 4096)])
@pytest.mark.parametrize(("rank", "factors"), [(0, None), (3, None), (16, None), (1, torch.float32)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_masked_rows_equal_float64_and_themselves(
    width: int, depth: int, dtype: torch.dtype, rank: int, factors: torch.dtype | None, with_norm: bool
) -> None:
    device = torch.device("cuda")
    torch.manual_seed(width + rank)
    low = low_rank(device, width, rank, factors or dtype) if rank else None
    gate, x, w = draw(device, width + 2 * rank), draw(device, depth), draw(device, width, depth, dtype=dtype)
    norm = Norm(draw(device, depth), 1e-5) if with_norm else None
    kept = torch.full((1,), -1, dtype=torch.int32, device=device)
    for threshold in (0.2, -1.0, 1e9):
        limit = torch.tensor([threshold], device=device)
        act = torch.full((width + rank,), float("nan"), device=device)
        launch = masked_rows.bind(gate, x, w, act, limit, kept, norm, low)
        launch()
        expected = op.reference(gate.double(), normed(x, norm), w.double(), threshold, wide(low))
        assert error(act, expected) < TOLERANCE if threshold < 1e9 else not act.any()
        assert kept.tolist() == [int((expected[:width] != 0).sum())]
        first = act.clone()
        act.fill_(float("nan"))
        launch()
        assert torch.equal(first, act)


@needs_gpu
def test_nan_passes_and_a_dropped_row_is_never_read() -> None:
    nan_passes_and_a_dropped_row_is_never_read(masked_rows.bind, torch.device("cuda"), 300, 256)
