"""The three sizes at which every claim runs, and how one is chosen on this machine.

Imports torch only to confirm a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from artifact import embedded
from artifact.errors import UserError, one_line

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Profile:
    """What a claim runs on.

    `model` is a path (Hugging Face directory or GGUF file) or a name that `artifact.shapes` knows; `text` is a file
    or None for the default text; `threads` is the number of CPU threads of a worker.
    """

    name: str
    model: str
    device: Device
    dtype: str
    text: str | None
    threads: int


NAMES = ("embedded", "gpu", "paper")
PAPER_MODEL = "llama-3.1-8b"


def choose(name: str | None = None, model: str | None = None, text: str | None = None) -> Profile:
    """The named profile, or the default of this machine: `gpu` where CUDA works, otherwise `embedded`."""
    cuda = cuda_available()
    name = name or ("gpu" if cuda else "embedded")
    if name not in NAMES:
        raise UserError(f"no profile is called {name!r}; choose one of {', '.join(NAMES)}")
    if name == "gpu" and not cuda:
        raise UserError(
            "profile 'gpu' needs a CUDA GPU and torch sees none; run `artifact doctor`, or use --profile embedded"
        )
    if name == "paper" and model is None:
        raise UserError("profile 'paper' needs the checkpoint; add --model DIRECTORY")
    device: Device = "cuda" if cuda and name != "embedded" else "cpu"
    default = str(embedded.model_file()) if name == "embedded" else PAPER_MODEL
    profile = Profile(name, default, device, "float16" if device == "cuda" else "float32", None, thread_count())
    if model is not None:
        profile = replace(profile, model=_existing(model, "--model"))
    if text is not None:
        profile = replace(profile, text=_existing(text, "--text"))
    return profile


def to_record(profile: Profile) -> dict[str, str | int | None]:
    """The profile as a run folder keeps it: files by name only."""
    text = None if profile.text is None else Path(profile.text).name
    return {**asdict(profile), "model": Path(profile.model).name, "text": text}


def from_record(record: Mapping[str, object]) -> Profile:
    """The profile of a stored run. UserError when the record is not one."""
    try:
        name, model, dtype = (str(record[key]) for key in ("name", "model", "dtype"))
        text, threads, device = record["text"], record["threads"], record["device"]
    except KeyError as error:
        raise UserError(f"the profile in run.json lacks {error}; it was not written by this artifact") from None
    if not isinstance(threads, int) or not isinstance(text, str | None) or device not in ("cpu", "cuda"):
        raise UserError("the profile in run.json is damaged; restore it or make a new run")
    return Profile(name, model, "cuda" if device == "cuda" else "cpu", dtype, text, threads)


def check_model(profile: Profile) -> None:
    """UserError with the command that repairs it when the profile rests on the embedded model and that is missing or
    altered.
    """
    if profile.model == str(embedded.model_file()):
        embedded.path()


def _existing(value: str, option: str) -> str:
    """An existing path made absolute; `--model` may also be a name without a slash that `artifact.shapes` resolves."""
    if "\0" in value:
        raise UserError(f"{option} {value!r} holds a NUL character; give the path of a file or directory")
    try:
        path = Path(value).expanduser()
        if path.exists():
            return str(path.resolve())
    except (OSError, RuntimeError) as error:  # too long a name; a ~ that names no user
        raise UserError(f"{option} cannot be looked up ({one_line(error)}); give a path of a file or folder") from None
    if option == "--model" and os.sep not in value and not value.endswith((".gguf", ".json")):
        return value
    raise UserError(f"{option} {value} does not exist; give the path of a file or directory")


def thread_count() -> int:
    """CPU threads this process may use: affinity mask, cut by a container's CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: the affinity mask is all there is to know
    return max(1, count)


def cuda_available() -> bool:
    """Whether torch can use a CUDA device; torch is imported only where an NVIDIA driver is present."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not Path("/proc/driver/nvidia/version").exists():
        return False
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
