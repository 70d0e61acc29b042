"""A run folder: raw samples, system record, verdicts, tables. Everything but samples and system can be derived again.

runs/<id>/run.json        what was asked: profile, quick, schema version; when the run was started (UTC)
runs/<id>/samples.jsonl   every raw sample (artifact.samples)
runs/<id>/system.json     the machine, without names or paths
runs/<id>/results.json    verdicts, derived by artifact.verify
runs/<id>/tables/*.tex    derived by paper_tables.render
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self

from artifact import depends
from artifact.errors import UserError
from artifact.portable import portable
from artifact.profiles import Profile, from_record, to_record
from artifact.samples import CellId, Row, SampleLog

SCHEMA = 1
STAMPED = ("claim", "cell", "block", "profile", "origin")  # columns that every sample carries
QUICK_BUDGET_S, FULL_BUDGET_S = 120.0, 360.0  # of one claim


@dataclass(frozen=True)
class Cell:
    """One measurement in one process: `task` ("module:function") is called with `params` and yields rows.

    fresh: a full run measures it in a freshly started interpreter, which shares no placement of code and weights with
    another block's; other cells may be forked (`fork_server`).
    """

    claim: str
    key: str
    task: str
    params: dict[str, Any]
    block: int = 0
    timeout_s: float = 900.0
    fresh: bool = False


@dataclass(frozen=True)
class CellResult:
    """What became of a cell. `error` is None, or one sentence; `usage` marks an error that is the user's to mend."""

    status: Literal["ok", "error"]
    rows: list[Row]
    seconds: float
    peak_bytes: int
    error: str | None = None
    usage: bool = False
    stderr: str = ""
    worker: Mapping[str, Any] = field(default_factory=dict)


class CellError(Exception):
    """At least one cell that a claim asked for has no valid rows. `usage`: the user's input is the cause."""

    def __init__(self, message: str, usage: bool = False) -> None:
        super().__init__(message)
        self.usage = usage


class Progress(Protocol):
    """Where a campaign says what it is doing."""

    def cells(self, claim: str, total: int, done: int) -> None: ...
    def begin(self, cell: Cell) -> None: ...
    def update(self, fraction: float, doing: str) -> None: ...
    def end(self, cell: Cell, result: CellResult) -> None: ...
    def close(self) -> None: ...


Executor = Callable[[Cell, Profile, "Run"], CellResult]
Many = Callable[[list[Cell], Profile, "Run"], Iterator[tuple[Cell, CellResult]]]


class Run:
    """One open run folder. Writable ones hold a lock: a second writer is refused with the holder's process id."""

    def __init__(self, path: Path, profile: Profile, quick: bool = False, budget_s: float | None = None) -> None:
        self.path = path
        self.profile = profile
        self.quick = quick
        self.deadline_s = budget_s if budget_s is not None else (QUICK_BUDGET_S if quick else FULL_BUDGET_S)
        self.progress: Progress | None = None
        self.executor: Executor | None = None
        self.many: Many | None = None  # an executor that takes many cells at once
        path.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = _lock(path)
        try:
            _check_options(path, profile, quick)
            self.log = SampleLog(path / "samples.jsonl", writable=True)
        except BaseException:
            self.close()
            raise
        self._sources: dict[str, str] = {}
        self._source_files: dict[str, Path] = {}
        self._expected = 0
        self._announced: set[CellId] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lock; the folder keeps everything that was finished."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start_claim(self, name: str, source: Path) -> None:
        """Begin a claim and say which file its cells depend on."""
        self._source_files[name] = source
        self._sources.pop(name, None)
        self._expected = 0
        self._announced = set()

    def expect(self, cells: int) -> None:
        """Say how many cells the claim will measure in all when it asks for a few at a time; for the time left."""
        self._expected = cells

    def announce(self, cells: list[CellId], missing: int) -> tuple[int, int]:
        """Count cells that are asked for; returns how many the claim has in all so far, and how many are complete."""
        self._announced.update(cells)
        return max(self._expected, len(self._announced)), len(self._announced) - missing

    def measure(self, cells: list[Cell]) -> list[Row]:
        """Run the cells that are not complete, each in its own process, and return the rows of all of them in order.

        A complete cell whose `depends` hash still holds is not run again. Raises CellError naming the failed cells
        after the others have finished; their rows are kept.
        """
        from artifact import campaign

        return campaign.measure(self, cells)

    def record(self, claim: str, key: str, rows: list[Row], block: int = 0) -> list[Row]:
        """Store rows that were computed in this process as one complete cell; unchanged ones are not stored twice."""
        cell = CellId(claim, key, block, self.profile.name)
        sources = self.sources(claim)
        stored = self.stamp(cell, rows)
        group = self.log.latest(cell)
        if group is None or group.closing.get("sources") != sources or self.log.rows(group) != stored:
            closing = {
                "status": "ok",
                "sources": sources,
                "depends": depends.cell_hash(sources, "", {}, {}),
                "seconds": 0.0,
            }
            self.log.append(cell, stored, closing)
        return stored

    def stamp(self, cell: CellId, rows: list[Row]) -> list[Row]:
        """Rows with the columns that every sample carries, free of this machine's paths."""
        reserved = dict(zip(STAMPED, (cell.claim, cell.key, cell.block, cell.profile, "live"), strict=True))
        for row in rows:
            if clash := [name for name in reserved if row.get(name, reserved[name]) != reserved[name]]:
                raise ValueError(f"cell {cell.key} yields its own value for the reserved column {clash[0]!r}")
            if "closed" in row:
                raise ValueError(f"cell {cell.key} yields the reserved column 'closed'")
        return [json.loads(json.dumps({**portable(row), **reserved})) for row in rows]

    def source(self, claim: str) -> Path:
        """The file that defines a claim."""
        return self._source_files.get(claim, depends.ROOT / "claims" / f"{claim}.py")

    def sources(self, claim: str) -> str:
        """Hash of everything but its parameters that a cell of this claim depends on; of any claim for ""."""
        if claim not in self._sources:
            source = self.source(claim) if claim else None
            inputs = [Path(p) for p in (self.profile.model, self.profile.text) if p and Path(p).exists()]
            self._sources[claim] = depends.sources_hash(source, models=inputs)
        return self._sources[claim]

    def depends(self, cell: Cell) -> str:
        """Hash of everything that the cell depends on: sources, task, parameters, profile."""
        return depends.cell_hash(self.sources(cell.claim), cell.task, portable(cell.params), to_record(self.profile))

    def measures(self, cell: Cell) -> str:
        """Hash of what is measured, whichever claim asks: equal for cells that may share their samples."""
        params = portable(cell.params) | {"block": cell.block}
        return depends.cell_hash(self.sources(""), cell.task, params, to_record(self.profile))

    def rows(self, claim: str) -> list[Row]:
        """All valid rows of a claim: the newest complete group of every cell, without failed cells."""
        return rows_of(self.log, claim)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace one JSON file of the folder in one step."""
        write_json(self.path / name, value)


def rows_of(log: SampleLog, claim: str) -> list[Row]:
    """The rows of the newest valid groups of a claim, in file order."""
    return [row for group in log.groups(claim) if group.closing.get("status") == "ok" for row in log.rows(group)]


def errors_of(log: SampleLog, claim: str) -> list[tuple[str, bool]]:
    """(reason, is it the user's to mend) of every cell of a claim whose last attempt failed."""
    closings = [group.closing for group in log.groups(claim) if group.closing.get("status") != "ok"]
    return [(f"cell {c['cell']}: {c.get('error', 'no reason recorded')}", bool(c.get("usage"))) for c in closings]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Sorted keys, strict JSON, replaced atomically: a reader sees the old file or the new one."""
    text = json.dumps(portable(dict(value)), sort_keys=True, indent=2, allow_nan=False) + "\n"
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read_json(path: Path, schema: int = SCHEMA) -> Row:
    """A JSON object of ours. UserError when it is missing, broken, or written by a newer version."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.name} is missing from {path.parent}; give the folder of a finished run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({type(error).__name__}); restore it or make a new run"
        ) from None
    if not isinstance(value, dict) or type(value.get("schema")) is not int:
        raise UserError(f"{path} has no schema version; it was not written by this artifact")
    if value["schema"] > schema:
        raise UserError(f"{path} has schema {value['schema']}, this version reads up to {schema}; update the artifact")
    return value


def runs_folder() -> Path:
    """Where runs are made and looked for by name: `runs` of the working directory, or what ARTIFACT_RUNS names."""
    return Path(os.environ.get("ARTIFACT_RUNS") or "runs")


def new_run_path(base: Path, label: str, now: time.struct_time | None = None) -> Path:
    """runs/20250102-030405-label, with a suffix when that second is taken."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S', now or time.localtime())}-{label}"
    for suffix in ["", *(f"-{i}" for i in range(2, 100))]:
        if not (base / (stem + suffix)).exists():
            return base / (stem + suffix)
    raise UserError(f"{base} holds a hundred runs named {stem}; name one with --run")


def _check_options(path: Path, profile: Profile, quick: bool) -> None:
    """One run answers one question: the same profile, model, text and length each time that it is resumed."""
    asked = to_record(profile)
    file = path / "run.json"
    if not file.exists():
        if (path / "samples.jsonl").exists():
            raise UserError(
                f"{path} has samples but no run.json; it was not made by this artifact, choose another --run"
            )
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(file, {"schema": SCHEMA, "quick": quick, "profile": asked, "started": started})
        return
    stored, stored_quick = read_options(path)
    kept = to_record(stored) | {"quick": stored_quick}
    for name in ("name", "model", "text", "dtype", "quick"):
        if kept[name] != (asked | {"quick": quick})[name]:
            raise UserError(
                f"run {path.name} was started with {name} {kept[name]!r}, not {(asked | {'quick': quick})[name]!r}; "
                "resume it with the same options or leave out --run"
            )


def read_options(path: Path) -> tuple[Profile, bool]:
    """Profile and quickness that a run folder was made with."""
    record = read_json(path / "run.json")
    if not isinstance(record.get("profile"), dict):
        raise UserError(f"{path / 'run.json'} names no profile; it was not written by this artifact")
    return from_record(record["profile"]), record.get("quick") is True


def _lock(path: Path) -> IO[str]:
    """Exclusive lock of a run folder, held until the file is closed or the process dies."""
    file = (path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise UserError(
            f"run {path.name} is being written by process {holder}; wait for it or choose another --run"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
