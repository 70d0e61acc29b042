"""Files that processes share: written whole, read back or made again, pruned by last use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from artifact.engine import prepared_files
from artifact.errors import UserError


def test_what_was_written_is_read_and_a_file_cut_short_is_not(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "numbers.safetensors"
    file.parent.mkdir()
    assert prepared_files.read(file) is None
    numbers = torch.arange(12.0).view(3, 4).T
    prepared_files.write(file, {"numbers": numbers})
    found = prepared_files.read(file)
    assert found is not None and torch.equal(found["numbers"], numbers)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    file.write_bytes(file.read_bytes()[:-5])
    assert prepared_files.read(file) is None


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, name: str, metadata: object = None) -> None:
        Path(name).write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match=r"written \(.*No space left.*\); free some disk or set ARTIFACT_DATA"):
        prepared_files.write(tmp_path / "numbers.safetensors", {"numbers": torch.zeros(3)})
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_files_go_first_and_the_new_one_stays(tmp_path: Path) -> None:
    files = []
    for age in range(4):
        file = tmp_path / f"folder{age % 2}" / f"{age}.safetensors"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(100))
        os.utime(file, (1000 + age, 1000 + age))
        files.append(file)
    prepared_files.prune(tmp_path, keep=files[0], limit=250)
    assert [file.exists() for file in files] == [True, False, False, True]


def test_a_folder_is_named_by_what_its_files_are_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARTIFACT_DATA", str(tmp_path))
    first = prepared_files.folder_of("model", "cpu/torch.float32")
    assert first.is_dir() and first == prepared_files.folder_of("model", "cpu/torch.float32")
    assert first != prepared_files.folder_of("model", "cuda/torch.float16")
    for name in prepared_files._SOURCES:
        assert (Path(prepared_files.__file__).parent.parent / name).is_file()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ARTIFACT_DATA", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set ARTIFACT_DATA to a writable folder"):
        prepared_files.folder_of("model")
