"""A finished run folder as every report reads it. Reports are derived from it alone, so they can be made again."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from artifact.errors import UserError
from artifact.profiles import Profile
from artifact.records import read_json, read_options
from artifact.samples import Group, Row, SampleLog
from artifact.verify import read_results


class NotMade(UserError):
    """A report that this run cannot give; the message says why."""


@dataclass(frozen=True)
class Stored:
    """One run: what was asked, what was measured, what it came to. `started` is an ISO date and time, or empty."""

    path: Path
    profile: Profile
    quick: bool
    started: str
    results: Mapping[str, Any]
    system: Mapping[str, Any]
    log: SampleLog

    @property
    def claims(self) -> dict[str, dict[str, Any]]:
        """Results of every claim by name, sorted."""
        return dict(sorted(self.results["claims"].items()))

    def rows(self, claim: str) -> list[tuple[int, Row]]:
        """Rows of a claim's valid cells, each with its line number in samples.jsonl."""
        return [
            (line, row)
            for group in self.log.groups(claim)
            if group.closing.get("status") == "ok"
            for line, row in enumerate(self.log.rows(group), self.first_line(group))
        ]

    def first_line(self, group: Group) -> int:
        """Line of samples.jsonl, from 1, at which the rows of a group start."""
        return self._lines.get(group.offset, 0)

    @cached_property
    def _lines(self) -> dict[int, int]:
        """Line number by byte offset, for every line."""
        lines: dict[int, int] = {}
        if not self.log.path.exists():
            return lines
        position = 0
        with self.log.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                lines[position] = number
                position += len(line)
        return lines

    @property
    def version(self) -> str:
        """Version of the installed artifact; "source" where it runs without an installation."""
        try:
            return importlib.metadata.version("sparse-decoding-artifact")
        except importlib.metadata.PackageNotFoundError:
            return "source"

    @property
    def machine(self) -> str:
        """The device that ran, in words."""
        gpus = ", ".join(str(gpu.get("name")) for gpu in self.system.get("gpus", []))
        if self.profile.device == "cuda" and gpus:
            return gpus
        return f"{self.profile.threads} threads of {self.system.get('cpu', {}).get('model') or 'an unnamed CPU'}"


def open_run(folder: Path) -> Stored:
    """Read a run folder. UserError when a file of it is missing or damaged."""
    profile, quick = read_options(folder)
    started = read_json(folder / "run.json").get("started")
    return Stored(
        folder,
        profile,
        quick,
        started if isinstance(started, str) else "",
        read_results(folder),
        read_json(folder / "system.json"),
        SampleLog(folder / "samples.jsonl"),
    )


def sha256(path: Path) -> str:
    """Hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested records as dotted names and text, sorted: {"cpu": {"model": x}} gives {"cpu.model": x}."""
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key in sorted(value):
            found |= flat(value[key], f"{prefix}.{key}" if prefix else str(key))
        return found
    if isinstance(value, list):
        if any(isinstance(one, (Mapping, list)) for one in value):
            return flat({str(i): one for i, one in enumerate(value)}, prefix)
        return {prefix: ", ".join(map(str, value)) or "none"}
    return {prefix: "-" if value is None else str(value)}
