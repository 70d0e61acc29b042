"""Faults that users of similar systems reported: the list in docs/known-faults.md, and tests that no other file has."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from artifact.engine.prepare import prepare_synthetic
from artifact.measure import cells
from artifact.measure.cells import member
from artifact.shapes import Shape
from artifact.stats import Verdict
from tests import faults

ROOT = Path(__file__).resolve().parent.parent
SHAPE = Shape("tiny", 96, 2, 6, 2, 32, 160, 211, 1024, False)
LISTED = re.findall(r"`((?:cuda/)?test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "known-faults.md").read_text())


def test_every_test_that_the_list_names_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "known-faults.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 35 and all("::test_" in row for row in rows[1:])
    missing = [f"{file}::{name}" for file, name in LISTED if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert not missing


@pytest.mark.parametrize("name", sorted(suite.claim for suite in faults.suites() if suite.unequal is not None))
def test_a_sample_lost_in_one_arm_only_is_an_error_of_every_claim(name: str) -> None:
    suite = faults.suite(name)
    assert suite.unequal is not None
    found = faults.judged(suite, suite.unequal)
    assert found.verdict is Verdict.ERROR, found


def test_nothing_of_transformers_is_used_but_its_loaders() -> None:
    """The engine has its own cache, so that no attribute of transformers' cache can be renamed under it."""
    loaders = {"AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "PreTrainedTokenizerBase"}
    used: dict[str, str] = {}
    for file in (path for folder in ("artifact", "claims", "kernels") for path in (ROOT / folder).rglob("*.py")):
        text = file.read_text()
        assert not re.search(r"past_key_values|DynamicCache", text), file.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "transformers":
                used[node.attr] = file.name
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                used |= {alias.name: file.name for alias in node.names}
    assert used and set(used) <= loaders, used


def test_a_failing_step_fails_what_runs_the_tests(tmp_path: Path) -> None:
    """The checks of every change pipe their tests through tee: the failure must come out of the pipe."""
    folder = tmp_path / ".ci"
    folder.mkdir()
    script = (ROOT / ".ci" / "run").read_text()
    assert "| tee" in script
    (folder / "run").write_text(script)
    (tmp_path / "Makefile").write_text("lint:\ntest:\n\t@echo '1 failed'; exit 1\nverify-all:\n\t@touch reached\n")
    done = subprocess.run(["bash", str(folder / "run")], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0 and "1 failed" in done.stdout
    assert not (tmp_path / "reached").exists()


def test_a_cell_is_not_timed_before_its_numbers_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_synthetic(SHAPE, "cpu", torch.float32, 256 + 4 + cells.EXTRA_STEPS)
    order: list[str] = []
    gate, clock = cells.gate_step, cells.interleave

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            order.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(cells, "gate_step", noted("gate", gate))
    monkeypatch.setattr(cells, "interleave", noted("clock", clock))
    cells.measure_group(prepared, [member(256), member(256, 0.5)], 4)
    assert order == ["gate", "gate", "clock"]

    def failing(decoder: Any) -> float:
        raise RuntimeError("qkv of layer 0 differs from its reference by 0.4")

    monkeypatch.setattr(cells, "gate_step", failing)
    order.clear()
    with pytest.raises(RuntimeError, match="differs from its reference"):
        cells.measure_group(prepared, [member(256), member(256, 0.5)], 4)
    assert order == []
