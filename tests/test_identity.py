"""Our package `kernels` is never taken for Hugging Face's, installed or not, whether that one is there or not."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
OLDEST_ACCEPTED = "0.9.0"  # KERNELS_MIN_VERSION of transformers 5.0; later releases ask for more

QUESTION = """
{first}
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import is_kernels_available
model = AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
import kernels
print(is_kernels_available(), kernels.__file__)
"""


def ask(first: str, folder: Path, *path: Path) -> str:
    """What a fresh Python in `folder` answers, with `path` in front of what is installed."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, path)))
    command = [sys.executable, "-c", QUESTION.format(first=first)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """What a path entry with Hugging Face's package looks like: its metadata, and a module."""
    metadata = tmp_path / "site" / "kernels-0.18.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    (metadata / "top_level.txt").write_text("kernels\n")
    (tmp_path / "site" / "kernels").mkdir()
    (tmp_path / "site" / "kernels" / "__init__.py").write_text("raise SystemExit('the wrong package was imported')\n")
    return tmp_path / "site"


@pytest.mark.parametrize("first", ["import artifact", ""])
def test_without_hugging_faces_package_transformers_says_it_is_absent(first: str) -> None:
    answer = ask(first, ROOT)
    assert answer == f"False {ROOT / 'kernels' / '__init__.py'}"


def test_beside_hugging_faces_package_ours_is_not_mistaken_for_it(hugging_face: Path) -> None:
    assert ask("import artifact", ROOT, ROOT, hugging_face) == f"False {ROOT / 'kernels' / '__init__.py'}"


def test_the_guard_is_what_makes_the_difference(hugging_face: Path) -> None:
    """Without it transformers believes the metadata: this fails if the cases above stop meaning anything."""
    with pytest.raises(AssertionError, match="cannot import name"):
        ask("", ROOT, ROOT, hugging_face)


def test_only_the_name_kernels_is_answered_for() -> None:
    import kernels

    assert version("kernels") == kernels.__version__ and Version(kernels.__version__) < Version(OLDEST_ACCEPTED)
    assert version("transformers") == __import__("transformers").__version__
    assert "kernels" not in packages_distributions().get("kernels", [])


def test_releases_stay_below_what_transformers_accepts() -> None:
    """Older transformers take the version of whichever distribution provides the import name: this project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert Version(project["version"]) < Version(OLDEST_ACCEPTED)
