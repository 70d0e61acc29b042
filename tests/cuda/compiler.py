"""What nvcc says of a CUDA C++ source: nothing here needs a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels" / "cuda"

needs_compiler = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def static_bytes(file: str, macros: Mapping[str, int], scratch: Path) -> int:
    """Compile for compute capability 9.0 and return the static shared memory of a block, in bytes."""
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", *defined, str(FOLDER / file)]
    done = subprocess.run([*command, "-o", str(scratch / "out.cubin")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) bytes smem", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])
