"""Where Numba keeps compiled code: by the sources it was made from, and never where the user said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import compiled

ROOT = Path(__file__).resolve().parent.parent


def test_the_folder_is_named_by_the_sources_and_exists() -> None:
    folder = compiled.cache_folder()
    assert folder is not None and Path(folder).is_dir() and Path(folder).name.startswith("numba-")
    assert folder == compiled.cache_folder()


def test_a_user_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "elsewhere")
    compiled.configure()
    assert os.environ["NUMBA_CACHE_DIR"] == "elsewhere"


def test_numba_sees_the_settings_whatever_is_imported_first() -> None:
    script = (
        "import kernels.cpu.gemv, numba; print(numba.config.CACHE_DIR); print(numba.config.THREADING_LAYER_PRIORITY)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    folder, layers = done.stdout.splitlines()
    assert folder == compiled.cache_folder() and layers.startswith("['omp'")
