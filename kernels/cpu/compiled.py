"""Where compiled code is kept and which threads run it: two settings that Numba reads when it is first imported."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def cache_folder() -> str | None:
    """A folder for compiled code named by the sources of this package, or None to leave Numba its default.

    Numba looks only at the file of a cached function: after an edit here it would go on using code that inlined the old
    version.
    """
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(here.glob("*.py"))))
    folder = here / "__pycache__" / f"numba-{digest.hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


def configure() -> None:
    """Set both unless the user has. OpenMP starts a parallel loop in 2 microseconds, Numba's own pool in 25."""
    os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")
    folder = None if "NUMBA_CACHE_DIR" in os.environ else cache_folder()
    if folder is not None:
        os.environ["NUMBA_CACHE_DIR"] = folder
