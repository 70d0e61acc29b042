"""The streaming form of the thresholded product: its launch configurations everywhere, its numbers on a GPU that runs
it. What it must compute is tested for the Triton form, on any machine, in test_projections.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import example, given
from hypothesis import strategies as st

from artifact.verbs import doctor
from kernels import gate_up as gate_up_op
from kernels import sparse_gemv as sparse_op
from kernels.cuda import nvrtc, sparse_rows
from kernels.cuda.common import column_tiles, shared_memory
from kernels.cuda.sparse_rows import Config, Product
from kernels.norm import Norm
from kernels.selection import Selection
from tests.cuda.compiler import asserted, needs_compiler, static_bytes
from tests.cuda.test_projections import TOLERANCE, chosen_by, draw, error, normed

# Site -> (segments, input channels, a norm over one part, width of a tile, blocks that share it).
LLAMA_8B = {
    "qkv": ((0, 4096, 5120, 6144), 4096, True, 48, 1),
    "o": ((0, 4096), 4096, False, 64, 2),
    "gate_up": ((0, 14336), 4096, False, 224, 2),
    "down": ((0, 4096), 14336, False, 64, 2),
}
H200, RTX_5090 = (233_472, 232_448), (102_400, 101_376)  # shared memory of a multiprocessor, of a block
CONFIGS = [None, Config(64, 1, 8, 4, 2), Config(128, 2, 16, 3, 2), Config(256, 8, 8, 4, 2), Config(448, 4, 8, 3, 1)]


def runs_here() -> bool:
    return torch.cuda.is_available() and not nvrtc.missing(torch.cuda.current_device())


needs_gpu = pytest.mark.skipif(not runs_here(), reason="needs a GPU of compute capability 9.0 with NVRTC")


@pytest.mark.parametrize("site", LLAMA_8B)
def test_one_wave_of_clusters_covers_the_columns_of_llama(site: str) -> None:
    segments, depth, dealt, width, cluster = LLAMA_8B[site]
    c = sparse_rows.config(segments, depth, dealt, 132)
    assert (c.columns, c.cluster) == (width, cluster)
    assert 126 <= c.cluster * len(column_tiles(segments, c.columns)) <= 132


@given(
    st.lists(st.integers(1, 2000).map(lambda n: 8 * n), min_size=1, max_size=3),
    st.integers(1, 3584).map(lambda n: 8 * n),
    st.integers(10, 180),
    st.booleans(),
    st.booleans(),
)
@example([128256], 4096, 132, True, False)  # a head: tiles of 976 columns, a thread each, for 512 threads
@example([4096, 4096, 4096], 4096, 16, True, False)  # Llama-2-7B's qkv on a small GPU
@example([26624], 16384, 132, True, True)  # inputs longer than the rings that hold them
def test_tiles_cover_every_column_once_and_what_is_taken_compiles(
    widths: list[int], depth: int, processors: int, normed: bool, paired: bool
) -> None:
    widths = widths[:1] if paired else widths
    segments = tuple(sum(widths[:i]) for i in range(len(widths) + 1))
    c = sparse_rows.config(segments, depth, normed and not paired, processors)
    tiles = column_tiles(segments, c.columns)
    assert [n for start, end, _, _ in tiles for n in range(start, end, 8)] == list(range(0, segments[-1], 8))
    assert sum(counts for *_, counts in tiles) == len(widths)
    assert all(segments[s] <= start < end <= segments[s + 1] for start, end, s, _ in tiles)
    product = Product(depth, 2 if paired else 1, False, normed, False, not paired)
    m = product.macros(c)
    assert m["CLUSTER"] * m["SLICE"] >= depth and m["SLICE"] % 8 == 0 and m["COLUMNS"] >= c.columns
    names, claims = asserted("sparse_rows.cu", m)
    assert product.fits(c) == all(claims.values()), claims
    dynamic = c.warps * names["RING_BYTES"] + 8 * names["PARTS"] * names["LONGEST"]
    assert product.dynamic_bytes(c, H200[0]) == max(105_000, dynamic)
    assert product.dynamic_bytes(c, RTX_5090[0]) == max(55_000, dynamic)


def on(monkeypatch: pytest.MonkeyPatch, shared: tuple[int, int], processors: int) -> None:
    """Let tensors of the CPU pass for those of a GPU."""
    monkeypatch.setattr(nvrtc, "overlaps", lambda tensor: True)
    monkeypatch.setattr(nvrtc, "missing", lambda device: "")
    monkeypatch.setattr(sparse_rows, "shared_memory", lambda tensor: shared)
    monkeypatch.setattr(sparse_rows, "multiprocessors", lambda tensor: processors)


def taken(depth: int, columns: int, segments: tuple[int, ...], normed: bool, paired: bool = False) -> bool:
    w = torch.zeros(1, dtype=torch.float16).expand(depth, columns)
    norm = Norm(torch.zeros(1).expand(depth), 1e-5) if normed else None
    return sparse_rows.takes(torch.zeros(1).expand(depth), w, segments, norm, paired)


@pytest.mark.parametrize(
    ("depth", "columns", "segments", "paired", "processors"),
    [
        (4096, 128256, (0, 128256), False, 132),
        (4096, 12288, (0, 4096, 8192, 12288), False, 20),
        (8192, 10240, (0, 8192, 9216, 10240), False, 16),
        (16384, 53248, (0, 26624), True, 132),
    ],
)
def test_shapes_that_would_not_compile_are_left_to_triton(
    depth: int, columns: int, segments: tuple[int, ...], paired: bool, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, H200, processors)
    assert not taken(depth, columns, segments, True, paired)


def test_no_block_asks_for_more_shared_memory_than_the_device_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product asked for 105,000 bytes; a block of compute capability 12.0 has 101,376."""
    on(monkeypatch, H200, 132)
    assert taken(4096, 4096, (0, 4096), False) and taken(14336, 4096, (0, 4096), False)
    on(monkeypatch, RTX_5090, 170)
    assert taken(4096, 4096, (0, 4096), False)
    assert not taken(14336, 4096, (0, 4096), False)  # 122,880 bytes
    exact = Product(4096, 1, False, False, False, False)
    c = sparse_rows.config((0, 4096), 4096, False, 170)
    most = exact.dynamic_bytes(c, RTX_5090[0]) + exact.static_bytes(c)
    for lent, fits in ((most, True), (most - 1, False)):
        monkeypatch.setattr(sparse_rows, "shared_memory", lambda tensor, lent=lent: (RTX_5090[0], lent))
        assert taken(4096, 4096, (0, 4096), False) == fits


def test_doctor_says_of_each_product_what_a_step_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    refused = doctor._refused_products
    monkeypatch.setattr(doctor, "_refused_products", lambda device: refused("cpu"))
    on(monkeypatch, H200, 132)
    assert doctor._sparse_products().found == "streamed, CUDA C++ compiled by NVRTC"
    on(monkeypatch, RTX_5090, 170)
    found = doctor._sparse_products()
    assert found.ok and "Llama-3.1-8B in Triton: down (125312 bytes of shared memory, 101376 at most)" in found.found
    monkeypatch.setattr(nvrtc, "missing", lambda device: "this NVRTC compiles for compute capability 12.0 at most")
    found = doctor._sparse_products()
    assert not found.ok and "in Triton" in found.found and "a newer torch" in found.fix


@pytest.mark.parametrize(("per_multiprocessor", "dynamic"), [(233_472, 105_000), (102_400, 55_000)])
def test_a_block_takes_over_half_of_what_a_multiprocessor_lends(per_multiprocessor: int, dynamic: int) -> None:
    assert sparse_rows.whole_bytes(per_multiprocessor) == dynamic


def test_shared_memory_is_the_device_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(
        shared_memory_per_multiprocessor=102_400, shared_memory_per_block=49_152, shared_memory_per_block_optin=101_376
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    weights: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert shared_memory(weights) == RTX_5090
    del card.shared_memory_per_block_optin  # a build of torch that does not say it
    assert shared_memory(weights) == (102_400, 49_152)


@needs_compiler
@pytest.mark.parametrize("site", LLAMA_8B)
def test_the_compiler_finds_the_static_memory_that_is_counted(site: str, tmp_path: Path) -> None:
    segments, depth, dealt, *_ = LLAMA_8B[site]
    paired = site == "gate_up"
    product = Product(depth, 2 if paired else 1, True, dealt or paired, not paired, not paired)
    c = sparse_rows.config(segments, depth, dealt, 132)
    assert static_bytes("sparse_rows.cu", product.macros(c), tmp_path) == product.static_bytes(c)


def bound(w: torch.Tensor, segments: tuple[int, ...], bias: torch.Tensor | None, *chosen: Config) -> None:
    select = Selection(torch.zeros(len(segments) - 1), segments, torch.zeros(len(segments) - 1, dtype=torch.int32))
    y = torch.zeros(w.shape[1])
    sparse_rows.bind(torch.zeros(w.shape[0]), w, y, select, bias, None, False, False, *chosen)


@pytest.mark.parametrize("chosen", [(), (Config(64, 1, 8, 4, 2),)])
def test_what_is_refused_cannot_be_bound(chosen: tuple[Config, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 weights were read as bfloat16 or half precision, rows of 60 weights across their ends."""
    on(monkeypatch, H200, 132)
    monkeypatch.setattr(nvrtc, "bind", lambda *_: None)
    bound(torch.zeros(64, 64, dtype=torch.float16), (0, 64), None, *chosen)
    with pytest.raises(ValueError, match="float32"):
        bound(torch.zeros(64, 64), (0, 64), None, *chosen)
    with pytest.raises(ValueError, match="multiples of 8"):
        bound(torch.zeros(64, 60, dtype=torch.float16), (0, 60), None, *chosen)


def test_a_bias_that_is_cast_is_there_before_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads it before it waits for the launch ahead, so nothing else orders the two."""
    on(monkeypatch, H200, 132)
    waits, read = [], []

    def bind(source: object, shape: object, tensors: tuple[torch.Tensor, ...], numbers: Any) -> None:
        read.append((len(waits), tensors[3].dtype))

    monkeypatch.setattr(nvrtc, "bind", bind)
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    w = torch.zeros(64, 64, dtype=torch.float16)
    for bias in (None, torch.zeros(64), torch.zeros(64, dtype=torch.float16)):
        bound(w, (0, 64), bias)
    assert read == [(0, torch.float32), (0, torch.float32), (1, torch.float32)]


def test_what_it_does_not_take_is_left_to_triton() -> None:
    x, w = torch.zeros(64), torch.zeros(64, 32, dtype=torch.float16)
    assert not sparse_rows.takes(x, w, (0, 32), None, False)  # a CPU tensor


def test_float32_is_left_to_triton_where_half_precision_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H200, 4)
    x, w = torch.zeros(64), torch.zeros(64, 32)
    assert sparse_rows.takes(x, w.bfloat16(), (0, 32), None, False)
    assert not sparse_rows.takes(x, w, (0, 32), None, False)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chosen", CONFIGS)
@pytest.mark.parametrize(("depth", "segments"), [(96, (0, 192)), (576, (0, 576, 768, 960)), (1544, (0, 40, 80, 1000))])
def test_products_equal_float64_and_themselves(
    depth: int, segments: tuple[int, ...], chosen: Config | None, dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    torch.manual_seed(depth)
    x, w = draw(device, depth), draw(device, depth, segments[-1], dtype=dtype)
    select = chosen_by(device, [0.5, 0.9, 0.1][: len(segments) - 1], segments)
    y = torch.full((segments[-1],), float("nan"), device=device)
    launch = sparse_rows.bind(x, w, y, select, None, None, False, False, chosen)
    launch()
    expected = sparse_op.reference(x.double(), w.double(), select.thresholds.double(), segments)
    assert error(y, expected) < TOLERANCE
    assert select.kept.tolist() == [int((x.abs() > t).sum()) for t in select.thresholds]
    first = y.clone()
    y.fill_(float("nan"))
    launch()
    assert torch.equal(first, y)

    norm, bias, before = Norm(draw(device, depth), 1e-5), draw(device, segments[-1]), draw(device, segments[-1])
    y = before.clone()
    sparse_rows.bind(x, w, y, select, bias, norm, True, False, chosen)()
    read = normed(x, norm)
    expected = sparse_op.reference(read, w.double(), select.thresholds.double(), segments, bias.double())
    assert error(y, before.double() + expected) < TOLERANCE


@needs_gpu
@pytest.mark.parametrize("chosen", CONFIGS)
@pytest.mark.parametrize(("depth", "inner"), [(96, 64), (576, 1536), (1544, 40)])
def test_gated_products_have_a_threshold_for_gate_and_one_for_up(depth: int, inner: int, chosen: Config | None) -> None:
    device = torch.device("cuda")
    torch.manual_seed(inner)
    x, w, norm = (
        draw(device, depth),
        draw(device, depth, 2 * inner, dtype=torch.float16),
        Norm(draw(device, depth), 1e-5),
    )
    select = chosen_by(device, [0.4, 0.8], (0, inner, 2 * inner))
    act = torch.full((inner,), float("nan"), device=device)
    sparse_rows.bind(x, w, act, select, None, norm, False, True, chosen)()
    read = normed(x, norm)
    assert error(act, gate_up_op.reference_sparse(read, w.double(), select.thresholds.double())) < TOLERANCE
    assert select.kept.tolist() == [int((read.abs() > t).sum()) for t in (0.4, 0.8)]


@needs_gpu
@pytest.mark.parametrize("with_norm", [False, True])
def test_extremes_nan_and_skipped_rows(with_norm: bool) -> None:
    device = torch.device("cuda")
    torch.manual_seed(5)
    x, w = draw(device, 64), draw(device, 64, 32, dtype=torch.float16)
    norm = Norm(torch.ones(64, device=device), 0.0) if with_norm else None
    read = normed(x, norm)
    for threshold, kept in ((1e9, 0), (0.0, 64), (-1.0, 64)):
        select = chosen_by(device, [threshold], (0, 32))
        y = torch.full((32,), float("nan"), device=device)
        sparse_rows.bind(x, w, y, select, None, norm, False, False)()
        assert int(select.kept) == kept
        expected = read @ w.double() if kept else torch.zeros(32, dtype=torch.float64, device=device)
        assert torch.allclose(y.double(), expected, atol=1e-4)

    w[int(read.abs().argmin())] = float("nan")
    select: Selection = chosen_by(device, [float(read.abs().min()) * 1.01], (0, 32))
    y = torch.zeros(32, device=device)
    launch = sparse_rows.bind(x, w, y, select, None, norm, False, False)
    launch()
    assert bool(torch.isfinite(y).all())
    x[5] = float("nan")
    launch()
    assert bool(torch.isnan(y).all())


@needs_gpu
def test_a_captured_product_reads_what_is_there_at_replay() -> None:
    device = torch.device("cuda")
    x, w = draw(device, 256), draw(device, 256, 512, dtype=torch.float16)
    select = chosen_by(device, [0.5], (0, 512))
    y = torch.zeros(512, device=device)
    launch = sparse_rows.bind(x, w, y, select, None, None, False, False)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    x.copy_(draw(device, 256))
    select.thresholds.fill_(0.8)
    graph.replay()
    expected = sparse_op.reference(x.double(), w.double(), select.thresholds.double(), (0, 512))
    assert error(y, expected) < TOLERANCE and int(select.kept) == int((x.abs() > 0.8).sum())
