"""Tensors that measuring processes make once and share: files under `prepared/` of the data folder.

A folder is named by a hash of what its files were made from, the sources that made them included; files are safe to
delete and pruned to MAX_BYTES, least recently used first.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from artifact.embedded import data_folder
from artifact.errors import UserError, one_line

MAX_BYTES = 4_000_000_000
_SOURCES = (
    "engine/prefill.py",
    "engine/models.py",
    "engine/checkpoints.py",
    "engine/rope.py",
    "engine/prompts.py",
    "engine/prepare.py",
    "projection/teal.py",
    "projection/magnitudes.py",
)


def folder_of(*parts: str) -> Path:
    """Make the folder of what follows from `parts`. UserError when it cannot be written."""
    digest = hashlib.sha256("|".join(parts).encode())
    here = Path(__file__).resolve().parent.parent
    for name in _SOURCES:
        digest.update((here / name).read_bytes())
    folder = data_folder() / "prepared" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); set ARTIFACT_DATA to a writable folder"
        ) from error
    return folder


def read(file: Path) -> dict[str, torch.Tensor] | None:
    """Memory-map a file of tensors; None when it is absent or was cut short (it is then made again)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(file))
        os.utime(file)
    except (SafetensorError, OSError):
        return None
    return tensors


def save(file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors. OSError when the disk is full, which the library reports as an error of its own."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, str(file), metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, one_line(error)) from error


def write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write under another name and rename, so that a killed process leaves no half file under the real one.

    Raises UserError when the disk is full or the folder cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    os.close(handle)
    try:
        save(Path(name), tensors)
        os.replace(name, file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); free some disk or set ARTIFACT_DATA") from error
    finally:
        Path(name).unlink(missing_ok=True)
    prune(file.parent.parent, keep=file)


def prune(root: Path, keep: Path, limit: int = MAX_BYTES) -> None:
    """Delete the least recently used prepared files until at most `limit` bytes remain; `keep` is never deleted."""
    files = sorted((p for p in root.glob("*/*.safetensors")), key=lambda p: p.stat().st_mtime)
    total = sum(p.stat().st_size for p in files)
    for file in files:
        if total <= limit:
            return
        if file != keep:
            total -= file.stat().st_size
            file.unlink(missing_ok=True)
