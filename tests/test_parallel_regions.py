"""Every parallel loop of a CPU kernel is one that was written as such."""

from __future__ import annotations

import ast
from pathlib import Path

import numba
import numpy as np
import pytest

from kernels.cpu.common import PRANGE

KERNELS = sorted((Path(__file__).parent.parent / "kernels" / "cpu").glob("*.py"))


def jitted(tree: ast.AST) -> list[dict[str, ast.expr]]:
    """The keyword arguments of every numba.njit call."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "numba.njit"]
    return [{word.arg or "": word.value for word in call.keywords} for call in calls]


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_kernels_ask_for_prange_alone(file: Path) -> None:
    for options in jitted(ast.parse(file.read_text(encoding="utf-8"))):
        assert "parallel" not in options or ast.unparse(options["parallel"]) == "PRANGE"


def test_array_assignments_stay_inside_the_thread_that_makes_them() -> None:
    """Numba's default turns each of these rows into a parallel loop: nine forks and joins where one was written."""

    def cleared(rows, total):  # type: ignore[no-untyped-def]
        for part in numba.prange(2):
            total[part] = np.float32(1)
        for row in range(rows.shape[0]):
            rows[row, :] = np.float32(0)

    def regions(parallel: object) -> int:
        compiled = numba.njit(parallel=parallel)(cleared)
        compiled(np.ones((9, 64), dtype=np.float32), np.zeros(2, dtype=np.float32))
        (signature,) = compiled.signatures
        return compiled.inspect_llvm(signature).count("call void @numba_parallel_for")

    # Twice: Numba empties a dictionary of options at the first compilation.
    assert (regions(PRANGE), regions(PRANGE), regions(True)) == (1, 1, 2)
