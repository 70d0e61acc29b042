"""Keeps this package from being taken for Hugging Face's `kernels`, which is another project with the same import name.

transformers decides whether that one is there by asking `importlib.metadata` for the version of whatever provides the
import `kernels`, and then imports names from it. Two facts keep the answer at "no": releases of this project stay below
the oldest version transformers accepts (0.9), and once this package is imported, `version("kernels")` speaks of it even
if Hugging Face's is installed further down the path. `artifact` imports it first, so every process of ours is covered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

VERSION = "0"  # below any version that transformers accepts; its 5.0 cannot parse a missing one


class _ThisPackage(Distribution):
    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: kernels\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).resolve().parent.parent / path


class _Finder(DistributionFinder):
    """Answers metadata questions about the name `kernels` alone; finds no modules."""

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        if getattr(context, "name", None) == "kernels":
            yield _ThisPackage()


def claim_name() -> None:
    """Make `importlib.metadata` answer for this package when asked about `kernels`. Harmless when called twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
