"""Recorded runs that ship with the repository: `recorded/<machine>/` with run.json, system.json and the raw samples,
or `recorded/<machine>/<model>/` where several models were measured; the name of a run is its path.

The samples are those of a run folder, plain or compressed (samples.jsonl.gz). They are judged again whenever they are
shown, by the judges of this version, and whatever comes from them is marked `recorded`.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from artifact.errors import UserError
from artifact.records import rows_of
from artifact.samples import Row, SampleLog

FOLDER = Path(__file__).resolve().parent / "recorded"
SAMPLES = ("samples.jsonl", "samples.jsonl.gz")


def machines() -> list[str]:
    """Names of the recorded machines, sorted."""
    folders = {file.parent for name in SAMPLES for file in FOLDER.rglob(name)}
    return sorted(folder.relative_to(FOLDER).as_posix() for folder in folders)


@contextmanager
def opened(machine: str) -> Iterator[Path]:
    """A scratch run folder with the machine's records and freshly derived results. UserError for an unknown machine."""
    from artifact.verify import derive

    if machine not in machines():
        known = ", ".join(machines()) or "none"
        raise UserError(f"no run is recorded for {machine!r}; under paper_tables/recorded there are: {known}")
    with tempfile.TemporaryDirectory(prefix="recorded-") as scratch:
        folder = Path(scratch)
        _unpack(FOLDER / machine, folder)
        derive(folder)
        yield folder


def recorded_rows(machine: str, claims: Sequence[str]) -> list[Row]:
    """The raw rows of these claims, without judging them. UserError for an unknown machine."""
    if machine not in machines():
        raise UserError(f"no run is recorded for {machine!r}; there are {', '.join(machines()) or 'none'}")
    with tempfile.TemporaryDirectory(prefix="recorded-") as scratch:
        _unpack(FOLDER / machine, Path(scratch))
        log = SampleLog(Path(scratch) / SAMPLES[0])
        return [row for claim in claims for row in rows_of(log, claim)]


def recorded_results() -> dict[str, dict[str, Any]]:
    """Results of every recorded machine by name, judged again."""
    from artifact.verify import read_results

    found = {}
    for machine in machines():
        with opened(machine) as folder:
            found[machine] = read_results(folder)
    return found


def _unpack(source: Path, target: Path) -> None:
    for name in ("run.json", "system.json"):
        if not (source / name).is_file():
            raise UserError(f"recorded run {source.name} lacks {name}; copy it from the run folder it came from")
        shutil.copyfile(source / name, target / name)
    if (source / SAMPLES[0]).is_file():
        shutil.copyfile(source / SAMPLES[0], target / SAMPLES[0])
        return
    with gzip.open(source / SAMPLES[1], "rb") as packed, (target / SAMPLES[0]).open("wb") as plain:
        shutil.copyfileobj(packed, plain)
