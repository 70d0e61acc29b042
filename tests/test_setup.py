"""Setting up: locks with a hash for everything, one sentence where something is missing, no work the second time.

`requirements/setup.sh` and the Makefile run with a stand-in for the environment's Python that notes what it was asked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def locked(file: Path) -> list[Requirement]:
    """The pinned requirements of a lock; fails when a line of it is anything else."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", file.read_text()))
    pins = []
    for line in text.splitlines():
        spec, *hashes = re.split(r"\s+--hash=", line)
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each.strip()) for each in hashes), line
        pins.append(Requirement(spec))
        assert [clause.operator for clause in pins[-1].specifier] == ["=="], line
    return pins


@pytest.mark.parametrize("file", LOCKS, ids=lambda file: file.name)
def test_a_lock_holds_pins_with_hashes_and_no_place(file: Path) -> None:
    assert locked(file)
    assert not re.search(r"://|\.(com|org|io)\b|--(index|extra|find)", file.read_text())


def test_torch_is_the_upstream_cpu_build() -> None:
    text = (ROOT / "requirements" / "torch-cpu.txt").read_text()
    assert text.count("torch==2.13.0+cpu") == 1
    assert "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b" in text


def test_the_locks_satisfy_what_the_package_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins: dict[str, str] = {}
    for file in LOCKS:
        for pin in locked(file):
            version = next(iter(pin.specifier)).version
            if file.name != "torch-cpu.txt":
                assert pins.setdefault(pin.name, version) == version, f"{pin.name} has two versions"
    for line in project["dependencies"] + project["optional-dependencies"]["dev"]:
        need = Requirement(line)
        assert need.specifier.contains(pins[need.name]), line


def test_locks_of_the_running_python_name_every_import() -> None:
    """Each third-party package that the code imports is pinned, or belongs to an extra that needs a GPU or Ray."""
    extras = {"triton", "flash_attn", "ray"}
    distribution = {"yaml": "pyyaml", "lm_eval": "lm-eval", "huggingface_hub": "huggingface-hub"}
    ours = {"artifact", "kernels", "claims", "paper_tables"}
    pinned = {pin.name.lower() for file in LOCKS for pin in locked(file) if file.name != "lint.txt"}
    missing = {}
    for folder in sorted(ours):
        for file in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"(?m)^\s*(?:from|import) (\w+)[\w.]*(?: import|\s*$| as)", file.read_text()):
                known = name in ours | extras | set(sys.stdlib_module_names)
                if not known and distribution.get(name, name).lower() not in pinned:
                    missing[name] = file.name
    assert not missing


FAKE_PYTHON = """#!/usr/bin/env bash
# Notes its arguments; answers what setup.sh asks of the environment's Python; fails where the test says so.
printf '%s\\n' "$*" >>"$LOG"
case "$*" in
  *torch-cpu.txt*) if [ -n "${FAIL_TORCH:-}" ] && [[ "${PIP_EXTRA_INDEX_URL:-}" != *"${INDEX_HAS_IT:-none}"* ]]; then
      echo "$FAIL_TORCH"; exit 1; fi;;
  *"-m pytest"*) exit "${PYTEST_CODE:-0}";;
  *hashlib*) exec "$REAL" "$@";;
esac
"""


@dataclass
class Project:
    """A copy of what setting up consists of, in a folder of its own, with stand-ins in its `.venv`."""

    root: Path
    env: dict[str, str]

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        (self.root / "log").write_text("")
        return subprocess.run(
            command, cwd=self.root, env=self.env | env, capture_output=True, text=True, timeout=60, check=False
        )

    def setup(self, *sets: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("requirements/setup.sh", *sets, **env)

    @property
    def installs(self) -> list[str]:
        return [line for line in (self.root / "log").read_text().splitlines() if "pip install" in line]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(FAKE_PYTHON)
    (binaries / "artifact").write_text('#!/bin/sh\necho "artifact $*"\nexit "${ARTIFACT_CODE:-0}"\n')
    for file in binaries.iterdir():
        file.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LOG": str(tmp_path / "log"), "TORCH": "cpu"}
    return Project(tmp_path, env | {"REAL": sys.executable})


def test_setting_up_again_installs_nothing_until_a_lock_changes(project: Project) -> None:
    assert project.setup("test").returncode == 0
    assert all("--require-hashes" in line or "--editable" in line for line in project.installs)
    assert len(project.installs) == 4
    assert project.setup("test").returncode == 0 and project.installs == []
    with (project.root / "requirements" / "test.txt").open("a") as stream:
        stream.write("# changed\n")
    project.setup("test")
    assert [line.split()[-1] for line in project.installs] == ["requirements/test.txt"]
    with (project.root / "requirements" / "run.txt").open("a") as stream:
        stream.write("# changed\n")
    project.setup("test")
    assert any("run.txt" in line for line in project.installs)


def test_setup_compiles_and_converts_once_until_a_kernel_changes(project: Project) -> None:
    def warmed() -> bool:
        return "-m artifact.measure.warm" in (project.root / "log").read_text()

    kernel = project.root / "kernels" / "cpu" / "gemv.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("first")
    assert project.setup().returncode == 0 and warmed()
    assert project.setup().returncode == 0 and not warmed()
    kernel.write_text("second")
    assert project.setup().returncode == 0 and warmed()


def test_a_moved_checkout_is_installed_again(project: Project, tmp_path: Path) -> None:
    project.setup()
    moved = Project(tmp_path.with_name(tmp_path.name + "-moved"), project.env)
    shutil.copytree(project.root, moved.root)
    moved.env["LOG"] = str(moved.root / "log")
    assert moved.setup().returncode == 0 and any("--editable" in line for line in moved.installs)


def test_an_install_that_failed_is_tried_again(project: Project) -> None:
    project.setup("test", FAIL_TORCH="DO NOT MATCH THE HASHES")
    assert project.setup("test").returncode == 0 and len(project.installs) == 4


def test_a_wrong_hash_stops_and_is_never_worked_around(project: Project) -> None:
    done = project.setup(FAIL_TORCH="THESE PACKAGES DO NOT MATCH THE HASHES: torch")
    assert done.returncode == 2 and "does not have its pinned hash" in done.stderr
    assert "torch-cuda" not in "".join(project.installs)


def test_torch_comes_from_its_own_index_only_when_the_others_lack_it(project: Project) -> None:
    done = project.setup(FAIL_TORCH="No matching distribution", INDEX_HAS_IT="https://torch.invalid/cpu",
                         TORCH_INDEX="https://torch.invalid/cpu")  # fmt: skip
    assert done.returncode == 0
    assert [line.split()[-1] for line in project.installs].count("requirements/torch-cpu.txt") == 2
    assert "torch-cuda" not in "".join(project.installs)


def test_without_the_cpu_build_the_locked_cuda_build_is_taken_and_said(project: Project) -> None:
    done = project.setup(FAIL_TORCH="No matching distribution", TORCH_INDEX="")
    assert done.returncode == 0 and "taking the CUDA build instead" in done.stderr
    assert any("--require-hashes -r requirements/torch-cuda.txt" in line for line in project.installs)


def test_cuda_takes_the_cuda_build(project: Project) -> None:
    assert project.setup(TORCH="cuda").returncode == 0
    assert not any("torch-cpu" in line for line in project.installs)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PYTHON": "no-such-python"}, "no no-such-python on PATH"),
        ({"TORCH": "tpu"}, "TORCH is 'tpu'"),
    ],
)
def test_what_is_missing_is_one_sentence(project: Project, env: dict[str, str], words: str) -> None:
    done = project.setup(**env)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_old_python_is_one_sentence(project: Project) -> None:
    old = project.root / "python3.10"
    old.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1;; *) echo 3.10;; esac\n')
    old.chmod(0o755)
    done = project.setup(PYTHON=str(old))
    assert done.returncode == 2 and "is Python 3.10 and 3.11 or newer is needed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_make_test_fails_when_a_test_fails(project: Project) -> None:
    assert project.run("make", "test").returncode == 0
    assert project.run("make", "test", PYTEST_CODE="1").returncode != 0


@pytest.mark.parametrize(("code", "accepted", "success"), [(0, "0", True), (3, "0", False), (3, "0 3", True),
                                                          (1, "0 3", False), (4, "0 3", False)])  # fmt: skip
def test_make_verify_all_hands_the_exit_code_on(project: Project, code: int, accepted: str, success: bool) -> None:
    done = project.run("make", "verify-all", f"OK_CODES={accepted}", "ARGS=--quick", ARTIFACT_CODE=str(code))
    assert (done.returncode == 0) == success
    assert "artifact verify-all --quick" in done.stdout


def test_the_wheel_ships_every_package_and_its_data(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "runs", "tests")
    shutil.copytree(ROOT, copy, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
               "--no-index", "--wheel-dir", str(tmp_path), str(copy)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    listed = zipfile.ZipFile(wheel).namelist()
    shipped = {file.relative_to(copy).as_posix() for name in ("artifact", "kernels", "claims", "paper_tables")
               for file in (copy / name).rglob("*") if file.is_file()}  # fmt: skip
    assert shipped - set(listed) == set()
    assert any(name.endswith("entry_points.txt") for name in listed)
    assert not any(name.startswith(("tests/", "docker/")) for name in listed)
