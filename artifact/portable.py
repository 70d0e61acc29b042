"""Keeps this machine's paths, user and host names out of everything that is written to a run folder."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# A slash that starts a path: at the beginning of the text or after a character that no path or address ends with.
_ABSOLUTE = re.compile(r"(?<![\w./:~>\-])(?:/[^\s/:'\"<>,;)\]]+)+/([^\s/:'\"<>,;)\]]+)")


def text(value: str) -> str:
    """The text with paths under the repository made relative, and every other absolute path cut to its last part."""
    for prefix, short in _prefixes():
        value = value.replace(prefix + os.sep, short)
    value = re.sub(re.escape(str(Path.home())) + r"(?![\w.\-])", "~", value)
    return _ABSOLUTE.sub(r".../\1", value)


def portable(value: Any) -> Any:
    """The same for every string inside lists, tuples and mappings; other values are returned as they are."""
    if isinstance(value, str):
        return text(value) if os.sep in value else value
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [portable(item) for item in value]
    return value


def _prefixes() -> list[tuple[str, str]]:
    """Known folders, longest first, so that an environment inside the repository keeps its own label."""
    known = {str(ROOT): "", sys.prefix: "python/", sys.base_prefix: "python/"}
    return sorted(((path, short) for path, short in known.items() if len(path) > 1), key=lambda item: -len(item[0]))
