"""The header of a GGUF file, walked within the bounds of the file before a library that trusts its counts reads it.

    magic, version, tensor count, key count
    keys:    name, type, value      (a string is its length and bytes, an array its type, length and elements)
    tensors: name, dimensions, type, offset

Every count and length in it is input: a header of a hundred bytes can claim terabytes.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

MAGIC = 0x46554747  # "GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# Bytes of the scalar types by their number in the format: integers of 8 to 32 bits, float32, bool, then 64 bits.
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
LEAST_KEY, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes of the shortest entry of either table
MAX_DIMENSIONS = 4


def check(path: Path) -> None:
    """Raise ValueError, saying what is wrong, unless every count and length lies within the file."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise ValueError("the file is shorter than a header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).header()


class _Walk:
    """A position in the file that never passes its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def header(self) -> None:
        magic, version = self._number("I"), self._number("I")
        if magic != MAGIC:
            raise ValueError("it does not start as one")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not one of {', '.join(map(str, VERSIONS))}")
        tensors, keys = self._number("Q"), self._number("Q")
        self._room(tensors, LEAST_TENSOR, "tensors")
        self._room(keys, LEAST_KEY, "keys")
        for _ in range(keys):
            self._string()
            self._value(self._number("I"))
        for _ in range(tensors):
            self._tensor()

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._string()
        elif kind == ARRAY:
            self._array()
        elif kind in SCALARS:
            self._skip(SCALARS[kind], "a value")
        else:
            raise ValueError(f"value type {kind} is unknown")

    def _array(self) -> None:
        kind, length = self._number("I"), self._number("Q")
        if kind == STRING:
            self._room(length, 8, "strings of an array")
            for _ in range(length):
                self._string()
        elif kind in SCALARS:
            self._room(length, SCALARS[kind], "elements of an array")
            self._skip(length * SCALARS[kind], "an array")
        else:
            raise ValueError(f"an array of value type {kind} is not supported")

    def _tensor(self) -> None:
        self._string()
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        self._skip(8 * dimensions + 4 + 8, "a tensor's description")

    def _string(self) -> None:
        self._skip(self._number("Q"), "a string")

    def _number(self, code: str) -> int:
        start = self.at
        self._skip(struct.calcsize(f"<{code}"), "a number")
        return int(struct.unpack_from(f"<{code}", self.data, start)[0])

    def _skip(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise ValueError(f"{what} of {size} bytes goes past the end of the file")
        self.at += size

    def _room(self, count: int, least: int, what: str) -> None:
        if count * least > len(self.data) - self.at:
            raise ValueError(f"{count} {what} do not fit into the file")
