"""Compiling and launching through NVRTC and the driver, both played: what is refused, what is said, what is released.
The kernels themselves run in test_sparse_rows.py and test_masked_rows.py, on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.cuda import nvrtc
from kernels.cuda.nvrtc import Shape, Source

SOURCE = Source("sparse_rows.cu", "thresholded", (("K", 64), ("CLUSTER", 2)))
SHAPE = Shape(8, 2, 512, 105_000)


class Failed(int):
    """A status other than success."""

    name = "STATUS_OF_THE_CALL"


class Compiler:
    """NVRTC for the architectures in `known`; `fails` names the call that fails."""

    def __init__(self, known: tuple[int, ...] = (90, 100, 120), fails: str = "") -> None:
        self.known, self.fails, self.alive = known, fails, 0

    def _status(self, call: str) -> int:
        return Failed(6) if call == self.fails else 0

    def nvrtcVersion(self) -> tuple[int, int, int]:
        return 0, 13, 0

    def nvrtcGetSupportedArchs(self) -> tuple[int, list[int]]:
        return self._status("nvrtcGetSupportedArchs"), list(self.known)

    def nvrtcCreateProgram(self, *_: object) -> tuple[int, str]:
        self.alive += 1
        return self._status("nvrtcCreateProgram"), "program"

    def nvrtcDestroyProgram(self, program: str) -> tuple[int]:
        self.alive -= 1
        return (0,)

    def nvrtcCompileProgram(self, *_: object) -> tuple[int]:
        return (self._status("nvrtcCompileProgram"),)

    def nvrtcGetProgramLogSize(self, program: str) -> tuple[int, int]:
        return 0, 9

    def nvrtcGetProgramLog(self, program: str, log: bytes) -> tuple[int]:
        ctypes.memmove(log, b"line 7: ?", 9)
        return (0,)

    def nvrtcGetCUBINSize(self, program: str) -> tuple[int, int]:
        return self._status("nvrtcGetCUBINSize"), 4

    def nvrtcGetCUBIN(self, program: str, cubin: bytes) -> tuple[int]:
        return (self._status("nvrtcGetCUBIN"),)


class Driver:
    """The driver; `fails` names the call that fails."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=SimpleNamespace(name="MAX_DYNAMIC"),
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=SimpleNamespace(name="CARVEOUT"),
    )
    CUstream = int

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __getattr__(self, call: str) -> Any:
        return lambda *_: (Failed(1) if call == self.fails else 0, "value")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing of one machine is known on the next."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_config", lambda shape: SimpleNamespace(hStream=None))
    for cached in (nvrtc.missing, nvrtc._function):
        cached.cache_clear()
    yield
    for cached in (nvrtc.missing, nvrtc._function):
        cached.cache_clear()


def play(
    monkeypatch: pytest.MonkeyPatch, compiler: Compiler, driver: Driver, capabilities: tuple[tuple[int, int], ...]
) -> None:
    """Stand in for a machine with a GPU per capability, the first of them current."""
    monkeypatch.setattr(nvrtc, "_bindings", lambda name: {"nvrtc": compiler, "driver": driver}[name])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def tensor(index: int) -> Any:
    """A tensor of a GPU."""
    return SimpleNamespace(device=torch.device("cuda", index), data_ptr=lambda: 16, dtype=torch.float16)


def test_every_gpu_is_asked_for_and_one_that_nvrtc_does_not_know_is_left_to_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, Compiler(), Driver(), ((9, 0), (12, 1), (8, 6)))
    monkeypatch.setattr(nvrtc, "overlaps", lambda tensor: True)
    assert nvrtc.missing(0) == "" and nvrtc.refusal(tensor(0)) == ""
    assert nvrtc.missing(1) == nvrtc.refusal(tensor(1))
    assert nvrtc.missing(1) == "this NVRTC compiles for compute capability 12.0 at most, not for 12.1"
    assert nvrtc.missing(2) == "compute capability 8.6, 9.0 is needed"


@pytest.mark.parametrize(
    ("compiler", "driver", "call"),
    [
        (Compiler(fails="nvrtcGetSupportedArchs"), Driver(), "nvrtcGetSupportedArchs"),
        (Compiler(), Driver("cuDriverGetVersion"), "cuDriverGetVersion"),
    ],
)
def test_a_library_that_does_not_answer_is_missing(
    compiler: Compiler, driver: Driver, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, compiler, driver, ((9, 0),))
    assert f"{call}: STATUS_OF_THE_CALL" in nvrtc.missing(0)


@pytest.mark.parametrize("call", ["nvrtcCompileProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN", ""])
def test_a_program_is_released_whether_it_compiles_or_not(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(fails=call)
    play(monkeypatch, compiler, Driver(), ((9, 0),))
    if call:
        with pytest.raises(RuntimeError) as error:
            nvrtc._cubin(SOURCE, "sm_90")
        text = str(error.value)
        assert text.startswith(f"{call} of thresholded of sparse_rows.cu (K=64 CLUSTER=2): STATUS_OF_THE_CALL")
        assert ("line 7: ?" in text) == (call == "nvrtcCompileProgram") and text.endswith(nvrtc.NEXT_STEP)
    else:
        assert len(nvrtc._cubin(SOURCE, "sm_90")) == 4
    assert compiler.alive == 0


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx"])
def test_an_error_of_the_driver_names_the_kernel_and_the_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, Compiler(), Driver(call), ((9, 0),))
    with pytest.raises(RuntimeError) as error:
        nvrtc.bind(SOURCE, SHAPE, (tensor(0),), ())()
    text = str(error.value)
    assert text.startswith(call) and "thresholded of sparse_rows.cu (K=64 CLUSTER=2)" in text
    assert text.endswith(f"STATUS_OF_THE_CALL; {nvrtc.NEXT_STEP}")
    assert call != "cuFuncSetAttribute" or "MAX_DYNAMIC = 105000" in text
    assert call != "cuLaunchKernelEx" or "blocks=8, cluster=2, threads=512" in text


@pytest.mark.parametrize("places", [(1,), (0, 1)])
def test_tensors_of_a_gpu_that_is_not_current_are_refused(
    places: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, Compiler(), Driver(), ((9, 0), (9, 0)))
    nvrtc.bind(SOURCE, SHAPE, (tensor(0),), ())()
    with pytest.raises(RuntimeError, match="on cuda:1 while cuda:0 is current"):
        nvrtc.bind(SOURCE, SHAPE, tuple(map(tensor, places)), ())
