"""The streaming form of the thresholded product: its launch configurations everywhere, its numbers on a GPU that runs
it. What it must compute is tested for the Triton form, on any machine, in test_projections.py.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from kernels import gate_up as gate_up_op
from kernels import sparse_gemv as sparse_op
from kernels.cuda import nvrtc, sparse_rows
from kernels.cuda.common import column_tiles
from kernels.cuda.sparse_rows import Config, Product
from kernels.norm import Norm
from kernels.selection import Selection
from tests.cuda.test_projections import TOLERANCE, chosen_by, draw, error, normed

# Site -> (segments, input channels, a norm over one part, width of a tile, blocks that share it).
LLAMA_8B = {
    "qkv": ((0, 4096, 5120, 6144), 4096, True, 48, 1),
    "o": ((0, 4096), 4096, False, 64, 2),
    "gate_up": ((0, 14336), 4096, False, 224, 2),
    "down": ((0, 4096), 14336, False, 64, 2),
}
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
    st.integers(20, 150),
    st.booleans(),
)
def test_tiles_cover_every_column_once_and_blocks_fit(
    widths: list[int], depth: int, processors: int, normed: bool
) -> None:
    segments = tuple(sum(widths[:i]) for i in range(len(widths) + 1))
    c = sparse_rows.config(segments, depth, normed, processors)
    tiles = column_tiles(segments, c.columns)
    assert [n for start, end, _, _ in tiles for n in range(start, end, 8)] == list(range(0, segments[-1], 8))
    assert sum(counts for *_, counts in tiles) == len(widths)
    assert all(segments[s] <= start < end <= segments[s + 1] for start, end, s, _ in tiles)
    product = Product(depth, 1, False, normed, False, True)
    m = product.macros(c)
    assert m["CLUSTER"] * m["SLICE"] >= depth and m["SLICE"] % 8 == 0 and m["COLUMNS"] >= c.columns
    kept = -(-depth // c.cluster) if normed else m["SLICE"]
    assert product.shared_bytes(c) >= 8 * kept + c.warps * c.depth * c.rows * 2 * m["COLUMNS"]


def test_what_it_does_not_take_is_left_to_triton() -> None:
    x, w = torch.zeros(64), torch.zeros(64, 32, dtype=torch.float16)
    assert not sparse_rows.takes(x, w, (0, 32), None, False)  # a CPU tensor


def test_float32_is_left_to_triton_where_half_precision_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "overlaps", lambda tensor: True)
    monkeypatch.setattr(nvrtc, "missing", lambda device: "")
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
