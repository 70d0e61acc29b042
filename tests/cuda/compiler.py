"""What a CUDA C++ source asks for, by its own constants and by nvcc: nothing here needs a GPU."""

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


def asserted(file: str, macros: Mapping[str, int]) -> tuple[dict[str, int], dict[str, bool]]:
    """Return the constants of a source under these macros, and what each of its static_asserts comes to."""
    text = (FOLDER / file).read_text()
    names = dict(macros)
    for name, expression in re.findall(r"^constexpr \w+ (\w+) = (.*?);", text, re.M):
        names[name] = _value(expression, names)
    claims = re.findall(r'^static_assert\((.*), ".*"\);', text, re.M)
    assert claims and len(claims) == text.count("static_assert(")
    return names, {claim: bool(_value(claim, names)) for claim in claims}


def _value(expression: str, names: Mapping[str, int]) -> int:
    """The value of an integer expression of C++ with at most one conditional."""
    chosen = re.fullmatch(r"(.*) \? (.*) : (.*)", expression)
    if chosen is not None:
        return _value(chosen[2] if _value(chosen[1], names) else chosen[3], names)
    python = re.sub(r"!(?!=)", " not ", expression).replace("&&", " and ").replace("||", " or ").replace("/", "//")
    return int(eval(python, {"__builtins__": {}}, dict(names)))
