"""Coverage-guided fuzzing of one target, where atheris is installed (`pip install atheris`; CPython 3.11 to 3.13):

    python tests/fuzz/guided.py gguf -max_total_time=60

Whatever follows the target is handed to libFuzzer. A crash leaves its input in the working directory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["artifact", "paper_tables"]):
    from artifact.errors import UserError
    from tests.fuzz.targets import targets


def main() -> None:
    """Fuzz the named target, starting from its valid inputs."""
    known = targets()
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        raise SystemExit(f"usage: guided.py TARGET [libFuzzer options]; targets are {', '.join(known)}")
    target = known[sys.argv[1]]

    def attack(data: bytes) -> None:
        try:
            target.run(data)
        except UserError:
            pass

    with tempfile.TemporaryDirectory() as corpus:
        for number, each in enumerate(target.seeds):
            (Path(corpus) / str(number)).write_bytes(each)
        atheris.Setup([sys.argv[0], "-rss_limit_mb=4096", "-timeout=60", *sys.argv[2:], corpus], attack)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
