"""What a cell depended on, as hashes: a cell is reused only while none of it changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from artifact.embedded import data_folder

ROOT = Path(__file__).resolve().parent.parent
# Sources that decide what a cell measures. Views, verbs and table templates are left out: editing them must not cost
# a re-run.
MEASURING = (
    "artifact/*.py",
    "artifact/engine/*.py",
    "artifact/measure/*.py",
    "artifact/judge/*.py",
    "artifact/deploy/*.py",
    "artifact/projection/*.py",
    "artifact/kv/*.py",
    "artifact/tasks/*.py",
    "artifact/tasks/*.json",
    "claims/_*.py",
    "kernels/**/*.py",
    "kernels/**/*.cu",
    "kernels/**/*.cuh",
)
_VIEWS = (
    "campaign",
    "fork_server",
    "ray_executor",
    "claim",
    "cli",
    "console",
    "depends",
    "errors",
    "portable",
    "predict",
)
_RECORDS = ("records", "results_check", "samples", "stats", "system", "verify")
NOT_MEASURING = frozenset(f"{stem}.py" for stem in (*_VIEWS, *_RECORDS))
LARGE_BYTES = 256 << 20
_file_hashes: dict[tuple[str, int, int], str] = {}


def sources_hash(claim_source: Path | None, root: Path = ROOT, models: Iterable[Path] = ()) -> str:
    """SHA-256 over a claim's file (None: no claim's), the measuring sources and the model and text files, by name and
    content.
    """
    digest = hashlib.sha256()
    found = {path for pattern in MEASURING for path in root.glob(pattern)}
    paths = {path for path in found if path.name not in NOT_MEASURING and not path.stem.endswith("_judge")}
    for path in sorted(paths):
        _feed(digest, path.relative_to(root).as_posix(), path)
    if claim_source is not None:
        _feed(digest, f"claims/{claim_source.name}", claim_source)
    for path in models:
        for part in model_files(path):
            _feed(digest, f"input/{part.name}", part)
    return digest.hexdigest()


def cell_hash(sources: str, task: str, params: Mapping[str, Any], profile: Mapping[str, Any]) -> str:
    """SHA-256 over the sources, the task and everything that it is given."""
    text = json.dumps([sources, task, params, profile], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def model_files(path: Path) -> list[Path]:
    """The files of a model that decide its output:

    the file itself, or a directory's weights, configuration and tokenizer.
    """
    if path.is_file():
        return [path]
    patterns = ("*.safetensors", "*.gguf", "*.json", "*.model", "*.txt")
    return sorted({part for pattern in patterns for part in path.glob(pattern) if part.is_file()})


def file_hash(path: Path) -> str:
    """SHA-256 of a file, computed once per size and modification time; that of a large file is kept on disk."""
    status = path.stat()
    key = (str(path), status.st_size, status.st_mtime_ns)
    if key not in _file_hashes:
        kept = _kept_hash(key) if status.st_size >= LARGE_BYTES else None
        if kept is not None and kept.exists():
            _file_hashes[key] = kept.read_text()
            return _file_hashes[key]
        with path.open("rb") as file:
            _file_hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
        if kept is not None:
            _keep(kept, _file_hashes[key])
    return _file_hashes[key]


def _kept_hash(key: tuple[str, int, int]) -> Path:
    return data_folder() / "hashes" / hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def _keep(file: Path, value: str) -> None:
    scratch = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(value)
        os.replace(scratch, file)
    except OSError:
        scratch.unlink(missing_ok=True)  # a read-only data folder: the file is hashed again next time


def _feed(digest: Any, name: str, path: Path) -> None:
    digest.update(f"{name}\0{file_hash(path)}\n".encode())
