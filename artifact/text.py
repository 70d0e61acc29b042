"""The real text that models are calibrated and evaluated on, always as two disjoint splits.

Order: an explicit file; WikiText-2 (raw) when its verified copy lies in the data folder; otherwise the English
documentation that ships inside CPython. `load` never touches the network, so every process of a run gets the same
text: the copy of WikiText-2 is made by `fetch_wikitext` at set-up, through `datasets`, from its cache or the hub.

    python -m artifact.text              # say which text would be used, and its hash
"""

from __future__ import annotations

import hashlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from artifact.embedded import data_folder
from artifact.errors import UserError

Split = Literal["calibration", "evaluation"]

DATASET = "Salesforce/wikitext"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
# Split -> (file of the dataset at that revision, its SHA-256). Calibration reads the validation split.
PARQUET: dict[Split, tuple[str, str]] = {
    "evaluation": (
        "wikitext-2-raw-v1/test-00000-of-00001.parquet",
        "5f1bea067869d04849c0f975a2b29c4ff47d867f484f5010ea5e861eab246d91",
    ),
    "calibration": (
        "wikitext-2-raw-v1/validation-00000-of-00001.parquet",
        "204929b7ff9d6184953f867dedb860e40aa69c078fc1e54b3baaa8fb28511c4c",
    ),
}
REACH_S = 3.0
DOWNLOAD_S = 120.0


@dataclass(frozen=True)
class Text:
    """One split of one text. `sha256` is of its UTF-8 bytes; `origin` says where it came from and why it was taken."""

    name: str
    sha256: str
    text: str
    origin: str

    @property
    def label(self) -> str:
        """One line for people: what text this is, its length and its hash."""
        return f"{self.name}, {len(self.text):,} characters, SHA-256 {self.sha256[:12]}... ({self.origin})"


def load(profile_text: str | None, split: Split) -> Text:
    """The `split` of the text that a profile names (a file), or of the default text when it names none.

    Raises UserError when the file cannot be read as UTF-8 text, or when this Python ships no documentation.
    """
    if split not in get_args(Split):
        raise ValueError(f"split {split!r} is neither calibration nor evaluation")
    if profile_text is not None:
        return _from_file(Path(profile_text), split)
    copies = {each: _wikitext_copy(each) for each in PARQUET}
    copy = copies[split]
    if copy is not None and None not in copies.values():  # never one split of WikiText-2 beside one of another text
        return _text(f"WikiText-2 {split}", copy, f"{DATASET} at {REVISION[:12]}, {PARQUET[split][0]}")
    return _text(f"CPython documentation {split}", _python_docs(split), _docs_origin())


def fetch_wikitext() -> str:
    """Copy both splits of WikiText-2 into the data folder if `datasets` has them cached or the hub answers.

    Returns one sentence on the outcome; not reaching the hub is an outcome, not an error.
    """
    if all(_wikitext_copy(split) is not None for split in PARQUET):
        return "WikiText-2: verified copy in the data folder."
    reason = _download(offline=True)
    if reason is not None and _hub_reachable():
        reason = _download(offline=False)
    if reason is None:
        return "WikiText-2: fetched and verified."
    return f"WikiText-2 is neither cached nor reachable ({reason}): CPython's documentation text will be used."


def _text(name: str, text: str, origin: str) -> Text:
    return Text(name, hashlib.sha256(text.encode()).hexdigest(), text, origin)


def _from_file(file: Path, split: Split) -> Text:
    """A user's file, cut at the line end nearest its middle: evaluation before the cut, calibration after it."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--text {file} is not UTF-8 text (byte {error.start}); convert it.") from None
    except OSError as error:
        raise UserError(f"--text {file} cannot be read ({error.strerror}); name a text file.") from None
    cut = text.find("\n", len(text) // 2) + 1
    if cut == 0 or not text[:cut].strip() or not text[cut:].strip():
        raise UserError(f"--text {file} cannot be cut into two halves at a line end; name a longer text file.")
    return _text(f"{file.name} {split}", text[:cut] if split == "evaluation" else text[cut:], "file given with --text")


def _docs_origin() -> str:
    major, minor = sys.version_info[:2]
    return f"pydoc_data of Python {major}.{minor}; WikiText-2 is not in the data folder"


def _python_docs(split: Split) -> str:
    """Every second topic of CPython's `pydoc_data.topics`, in name order, without paragraphs that stood before.

    Topics quote each other (`typesseq` holds `typesseq-mutable`), so dropping repeats makes the splits disjoint.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "This Python ships without its documentation text (pydoc_data); give a text file with --text."
        ) from None
    seen: set[str] = set()
    halves: list[list[str]] = [[], []]
    for number, name in enumerate(sorted(topics)):
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                halves[number % 2].append(paragraph.strip("\n"))
    return "\n\n".join(halves[0 if split == "evaluation" else 1]) + "\n"


def _copy_file(split: Split) -> Path:
    return data_folder() / "text" / f"wikitext-2-{split}.txt"


def _wikitext_copy(split: Split) -> str | None:
    """The data folder's copy, if its content still has the hash noted when it was made from the pinned file."""
    file = _copy_file(split)
    try:
        text = file.read_bytes()
        noted = file.with_suffix(".sha256").read_text().split()
    except OSError:
        return None
    if noted != [hashlib.sha256(text).hexdigest(), PARQUET[split][1]]:
        return None
    return text.decode()


# Runs in a process of its own: the libraries read their offline switches at import, and a hung download can be ended.
_SCRIPT = """
import hashlib, sys
from huggingface_hub import hf_hub_download
dataset, revision, name, expected, offline, cache, out = sys.argv[1:]
path = hf_hub_download(dataset, name, repo_type="dataset", revision=revision, local_files_only=offline == "1")
with open(path, "rb") as stream:
    found = hashlib.file_digest(stream, "sha256").hexdigest()
if found != expected:
    sys.exit(f"{name} has SHA-256 {found[:12]}..., pinned is {expected[:12]}...")
from datasets import load_dataset
rows = load_dataset("parquet", data_files=path, split="train", cache_dir=cache)
with open(out, "w", encoding="utf-8", newline="") as stream:
    stream.write("".join(rows["text"]))
"""


def _download(offline: bool) -> str | None:
    """Make the copies; None when done, else why not. `offline` looks only into the hub's cache on this disk."""
    env = dict(os.environ, HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_ETAG_TIMEOUT="5", HF_HUB_DOWNLOAD_TIMEOUT="10")
    if offline:
        env.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    for split, (name, expected) in PARQUET.items():
        with tempfile.TemporaryDirectory() as work:
            out = Path(work) / "text"
            words = [DATASET, REVISION, name, expected, str(int(offline)), work, str(out)]
            command = [sys.executable, "-c", _SCRIPT, *words]
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
            except subprocess.TimeoutExpired:
                return f"no answer within {DOWNLOAD_S:.0f} s"
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
                return "not in the cache" if offline else lines[-1].strip()[:160]
            _store(split, out.read_bytes(), expected)
    return None


def _store(split: Split, text: bytes, parquet_sha256: str) -> None:
    file = _copy_file(split)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".part").write_bytes(text)
        os.replace(file.with_suffix(".part"), file)
        file.with_suffix(".sha256").write_text(f"{hashlib.sha256(text).hexdigest()}\n{parquet_sha256}\n")
    except OSError as error:
        raise UserError(f"{file.parent} cannot be written ({error.strerror}); set ARTIFACT_DATA elsewhere.") from None


def _hub_reachable() -> bool:
    """Whether the hub answers within REACH_S; the wait is bounded here because name lookup knows no timeout."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        try:
            urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=REACH_S).close()
            answers.put(True)
        except urllib.error.HTTPError:
            answers.put(True)  # it answered, if only to refuse this page
        except (OSError, ValueError):
            answers.put(False)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=REACH_S)
    except queue.Empty:
        return False


if __name__ == "__main__":
    for part in get_args(Split):
        print(load(None, part).label)
