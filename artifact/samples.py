"""The append-only file of raw samples, `samples.jsonl`: one group of lines per cell, its closing line last.

A group is written in one go and synced: the rows, then a closing line with their count and the SHA-256 of all of it. A
reader trusts a group only when its closing line matches, so a killed process, a full disk, a truncated or a hand-edited
file can lose or invent no cell. Opening for writing cuts off a half-written tail. Memory holds one index entry per
cell; rows stay on disk until asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifact.errors import UserError

Row = dict[str, Any]
CLOSING = "closed"


@dataclass(frozen=True)
class CellId:
    """Identity of a cell inside a run."""

    claim: str
    key: str
    block: int
    profile: str


@dataclass(frozen=True)
class Group:
    """One trusted group: where its rows lie in the file, and its closing line."""

    cell: CellId
    offset: int
    length: int
    closing: Row


def encode(row: Row) -> bytes:
    """One line of JSON with sorted keys.

    Non-finite floats keep Python's NaN and Infinity tokens, so they survive a round trip.
    """
    return json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def scan(path: Path) -> tuple[list[Group], int, int]:
    """Trusted groups in file order, bytes up to the end of the last one, and how many lines lie outside of them."""
    groups: list[Group] = []
    trusted_end = start = position = lines = dropped = 0
    digest = hashlib.sha256()
    if not path.exists():
        return groups, 0, 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            closing = _closing(line)
            if closing is None:
                digest.update(line)
                lines += 1
                continue
            cell = _identity(closing)
            if cell and closing.get("rows") == lines and _matches(digest, closing):
                groups.append(Group(cell, start, position - len(line) - start, closing))
                trusted_end = position
            else:
                dropped += lines + 1
            start, lines, digest = position, 0, hashlib.sha256()
    return groups, trusted_end, dropped + lines


def _checksum(body: bytes, closing: Row) -> str:
    """SHA-256 of the lines of a group and of everything that its closing line says besides."""
    return _sealed(hashlib.sha256(body), closing)


def _sealed(digest: hashlib._Hash, closing: Row) -> str:
    digest.update(encode({key: value for key, value in closing.items() if key != "sha256"}))
    return digest.hexdigest()


def _matches(digest: hashlib._Hash, closing: Row) -> bool:
    try:
        return bool(closing.get("sha256") == _sealed(digest, closing))
    except RecursionError:
        return False  # nested by hand, deeper than it can be written


def _closing(line: bytes) -> Row | None:
    """The closing line, or None for a row, a half line and anything that is not JSON."""
    if b'"closed":' not in line or not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and row.get(CLOSING) is True else None


def _identity(row: Row) -> CellId | None:
    claim, key, block, profile = (row.get(name) for name in ("claim", "cell", "block", "profile"))
    if isinstance(claim, str) and isinstance(key, str) and type(block) is int and isinstance(profile, str):
        return CellId(claim, key, block, profile)
    return None


class SampleLog:
    """Reader and, with `writable`, the only writer of one samples file."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.path = path
        groups, end, self.dropped_lines = scan(path)
        self._latest = {group.cell: group for group in groups}
        self._sources = {group.cell.claim: str(group.closing.get("sources", "")) for group in groups}
        self._writable = writable
        if writable and path.exists() and path.stat().st_size > end:
            # What follows the last trusted group is a half-written cell; the next cell must not be glued to it.
            with path.open("r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())

    def append(self, cell: CellId, rows: list[Row], closing: Row) -> Group:
        """Write one group and sync it. On a failed write (disk full) the file is cut back: UserError."""
        if not self._writable:
            raise ValueError(f"{self.path.name} was opened for reading")
        body = b"".join(encode(row) for row in rows)
        tail = {**closing, CLOSING: True, "rows": len(rows)}
        tail |= {"claim": cell.claim, "cell": cell.key, "block": cell.block, "profile": cell.profile}
        tail |= {"sha256": _checksum(body, tail)}
        start = self._write(body + encode(tail))
        group = Group(cell, start, len(body), tail)
        self._latest[cell] = group
        self._sources[cell.claim] = str(tail.get("sources", ""))
        return group

    def _write(self, data: bytes) -> int:
        """Append and sync; returns where the data starts.

        Unbuffered, so that nothing is left to be flushed after a failure.
        """
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            start = os.lseek(handle, 0, os.SEEK_END)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(handle, left) :]
                os.fsync(handle)
            except OSError as error:
                os.ftruncate(handle, start)
                raise UserError(
                    f"samples cannot be written to run {self.path.parent.name} ({error.strerror}); "
                    f"free some space and resume with --run {self.path.parent}"
                ) from error
        finally:
            os.close(handle)
        return start

    def latest(self, cell: CellId) -> Group | None:
        """The last trusted group of a cell."""
        return self._latest.get(cell)

    def groups(self, claim: str | None = None) -> list[Group]:
        """Last trusted group of every cell, measured with the newest sources of its claim, in file order.

        Groups from before an edit of the sources stay in the file and are not returned.
        """
        current = [
            g
            for g in self._latest.values()
            if claim in (None, g.cell.claim) and str(g.closing.get("sources", "")) == self._sources[g.cell.claim]
        ]
        return sorted(current, key=lambda group: group.offset)

    def claims(self) -> list[str]:
        """Names of the claims with at least one trusted group."""
        return sorted(self._sources)

    def rows(self, group: Group) -> list[Row]:
        """The rows of one group, read from disk. ValueError when the file changed since it was scanned."""
        with self.path.open("rb") as file:
            file.seek(group.offset)
            body = file.read(group.length)
        if _checksum(body, group.closing) != group.closing["sha256"]:
            raise ValueError(f"{self.path.name} changed while it was being read, at byte {group.offset}")
        return list(_decode(body))


def _decode(body: bytes) -> Iterator[Row]:
    for line in body.splitlines():
        yield json.loads(line)
