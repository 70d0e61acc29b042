"""The image's parts, as far as they can be checked without an engine; `docker/test_image.sh` builds and runs it."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*(ROOT / "docker").glob("*.sh"), *(ROOT / "requirements").glob("*.sh"), ROOT / ".ci" / "run"])


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, comments dropped and continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def position(word: str, text: str) -> int:
    return next(i for i, (name, rest) in enumerate(instructions()) if name == word and text in rest)


def test_the_classic_builder_and_podman_can_read_it() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert not text.startswith("# syntax")
    assert not re.search(r"--mount|--link|--chmod|<<", text)


def test_the_base_is_named_by_tag_and_can_be_replaced() -> None:
    assert instructions()[:2] == [("ARG", "BASE_IMAGE=debian:bookworm-slim"), ("FROM", "${BASE_IMAGE}")]


def test_it_does_not_run_as_root_and_starts_the_entry_point() -> None:
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users[-1] not in ("root", "0")
    (entry,) = (json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT")
    assert entry == ["/opt/artifact/docker/entrypoint.sh"] and os.access(ROOT / "docker" / "entrypoint.sh", os.X_OK)


def test_heavy_layers_come_before_the_source() -> None:
    source = position("COPY", ". .")
    assert position("RUN", "setup.sh --packages") < position("RUN", "artifact.embedded") < source
    copied_before = " ".join(rest for name, rest in instructions()[:source] if name == "COPY").split()
    for name in copied_before:
        assert name.endswith("/") or (ROOT / name).exists(), name
    assert "pyproject.toml" not in copied_before and not {"artifact", "kernels"} & set(copied_before)


def test_the_files_copied_before_the_source_can_do_what_runs_on_them() -> None:
    """Every module that they import, at their head or inside a function, is copied with them."""
    copied: set[str] = set()
    for name, rest in instructions()[: position("COPY", ". .")]:
        *sources, target = rest.split()
        if name == "COPY" and target.endswith("/"):
            copied |= {source for source in sources if source.endswith(".py")}
            assert all(str(Path(source).parent) + "/" == target for source in sources), rest
    assert "artifact/engine/gguf_file.py" in copied and "kernels/__init__.py" in copied
    missing = {(file, needed) for file in copied for needed in project_imports(file) - copied}
    assert not missing


def project_imports(file: str) -> set[str]:
    """Files of ours that a file's import statements name, wherever they stand in it, packages of them included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            for end in range(1, len(parts) + 1):
                path = "/".join(parts[:end])
                found |= {name for name in (f"{path}.py", f"{path}/__init__.py") if (ROOT / name).is_file()}
    return found


def test_everything_written_at_run_time_goes_to_tmp() -> None:
    variables = dict(pair.split("=", 1) for name, rest in instructions() if name == "ENV" for pair in shlex.split(rest))
    for name in ("ARTIFACT_DATA", "HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR"):
        assert variables[name].startswith("/tmp"), name


def test_the_context_is_a_list_of_what_is_needed() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    assert {
        "artifact",
        "claims",
        "kernels",
        "paper_tables",
        "requirements",
        "tests/faults",
        "docker/entrypoint.sh",
    } <= set(allowed)
    assert all((ROOT / name).exists() for name in allowed)


def test_the_compose_file_runs_both_images_without_network_or_writable_root() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert set(services) == {"artifact", "gpu"}
    for service in services.values():
        assert service["network_mode"] == "none" and service["read_only"] and service["tmpfs"] == ["/tmp:exec"]
    assert services["gpu"]["build"]["args"]["TORCH"] == "cuda"
    assert services["gpu"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_a_script_parses_and_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    if script.name != "entrypoint.sh":  # that one is plain sh
        assert "set -euo pipefail" in script.read_text()


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """A working folder with an `artifact` on PATH that only repeats its arguments."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "artifact"
    stub.write_text('#!/bin/sh\necho "called: $*"\nexit "${CODE:-0}"\n')
    stub.chmod(0o755)
    return tmp_path


def enter(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NVIDIA_NODE": str(folder / "no-gpu")}
    full |= {"ARTIFACT_DATA": str(folder / "data"), "BAKED_DATA": str(folder / "baked")} | env
    command = [str(ROOT / "docker" / "entrypoint.sh"), *words]
    return subprocess.run(command, cwd=folder, env=full, capture_output=True, text=True, timeout=20, check=False)


def test_the_entry_point_hands_words_and_exit_code_on(container: Path) -> None:
    done = enter(container, "verify", "crossover", "--quick", CODE="3")
    assert done.returncode == 3 and done.stdout == "called: verify crossover --quick\n"
    assert enter(container).stdout == "called: \n"


def test_the_entry_point_says_that_there_is_no_gpu_only_where_it_matters(container: Path) -> None:
    assert "no GPU here" in enter(container, "verify-all").stderr
    assert enter(container, "list").stderr == ""
    (container / "nvidia").touch()
    assert enter(container, "verify-all", NVIDIA_NODE=str(container / "nvidia")).stderr == ""


def test_baked_data_is_linked_where_derived_data_can_be_written(container: Path) -> None:
    (container / "baked" / "model").mkdir(parents=True)
    (container / "baked" / "model" / "weights").touch()
    for _ in range(2):
        assert enter(container, "list").returncode == 0
    assert (container / "data" / "model" / "weights").exists() and os.access(container / "data", os.W_OK)
    assert [file.name for file in (container / "data").iterdir()] == ["model"]


def test_results_that_cannot_be_written_are_one_sentence(container: Path) -> None:
    (container / "runs").write_text("a file, not a folder")
    done = enter(container, "verify-all")
    assert done.returncode == 2 and "results cannot be written" in done.stderr and done.stdout == ""
    assert enter(container, "list").returncode == 0
