"""Memory of streamed tensors: shapes, alignment, no overlap, and huge pages where the system gives them."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from kernels import memory
from kernels.cpu import bandwidth

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("shape", [(3, 5), (960, 576), (1536, 576), (3, 4096, 64), (0, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_have_the_shape_and_are_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = memory.empty(shape, dtype, "cpu")
    assert found.shape == shape and found.dtype == dtype and found.is_contiguous()
    assert found.numel() == 0 or found.data_ptr() % memory.ALIGN_BYTES == 0


def test_tensors_of_one_region_never_overlap() -> None:
    sizes = [(100, 700), (70_001,), (1000, 1000), (333, 777)] * 12
    tensors = [memory.empty(size, torch.float32, "cpu").fill_(i) for i, size in enumerate(sizes)]
    assert all(bool((one == i).all()) for i, one in enumerate(tensors))


def test_a_region_outlives_all_but_its_last_tensor() -> None:
    regions = memory.Regions()
    first, second = regions.take(1 << 20).fill_(1), regions.take(1 << 20).fill_(2)
    del first, regions
    gc.collect()
    assert bool((second == 2).all())


def test_what_is_kept_lies_in_one_region_and_what_does_not_fit_elsewhere() -> None:
    regions = memory.Regions()
    regions.take(1 << 20)
    assert regions.kept().numel() == 0
    regions.keep(3 * memory.REGION_BYTES)
    large, small = regions.take(2 * memory.REGION_BYTES).fill_(1), regions.take(100).fill_(2)
    kept = regions.kept()
    assert kept.numel() == large.numel() + small.numel()
    assert kept.data_ptr() == large.data_ptr() and small.data_ptr() == large.data_ptr() + large.numel()
    beyond, after = regions.take(2 * memory.REGION_BYTES).fill_(3), regions.take(100).fill_(4)
    assert regions.kept().numel() == kept.numel() + 128  # of `after`, aligned: there was room for it
    assert bool((large == 1).all() and (small == 2).all() and (beyond == 3).all() and (after == 4).all())
    regions.take(memory.REGION_BYTES // 2)
    regions.take(memory.REGION_BYTES // 2 + 100)
    regions.take(memory.REGION_BYTES // 2)  # opens another region
    assert regions.kept().numel() == 5 * memory.REGION_BYTES // 2 + 256


def test_bandwidth_reads_the_kept_weights_where_they_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = memory.Regions()
    monkeypatch.setattr(memory, "_regions", regions)
    memory.keep(1 << 20)
    weights = memory.empty((250_000,), torch.float32, "cpu").fill_(1.0)
    for asked, same in ((250_000, True), (330_000, True), (400_000, False), (200_000, True)):
        buffer = bandwidth.make_buffer(asked)
        assert (buffer.data_ptr() == weights.data_ptr()) is same
        assert buffer.numel() == (min(asked, 250_000) if same else asked)


def test_a_copy_of_a_transposed_tensor_is_laid_out_anew() -> None:
    source = torch.arange(300_000.0).view(600, 500)
    copy = memory.placed(source.T)
    assert copy.is_contiguous() and torch.equal(copy, source.T)


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not THP.exists() or "[never]" in THP.read_text(),
    reason="this system gives no huge pages on request",
)
def test_matrices_of_two_megabytes_lie_in_huge_pages() -> None:
    kept = [memory.empty((960, 576), torch.float32, "cpu").fill_(1.0) for _ in range(30)]
    covered = 0
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part)
        if bounds and any(int(bounds[1], 16) <= one.data_ptr() < int(bounds[2], 16) for one in kept):
            covered += 1024 * int(re.search(r"AnonHugePages:\s+(\d+) kB", part)[1])  # type: ignore[index]
    assert covered >= 0.8 * sum(one.nbytes for one in kept)
