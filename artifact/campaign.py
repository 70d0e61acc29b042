"""Runs cells one after another, each in a process of its own, and keeps what each one came to.

A cell that asks for it starts a fresh interpreter in a full run; any other is forked from one that has loaded the
libraries and the model (`fork_server`).

A crash, a hang, an exhausted memory or a kill is that cell's error; the others go on. Nothing here knows what a cell
measures.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

from artifact import profiles
from artifact.depends import ROOT
from artifact.fork_server import Forked, ForkServer, Unavailable
from artifact.portable import portable
from artifact.profiles import Profile
from artifact.records import STAMPED, Cell, CellError, CellResult, Progress, Run
from artifact.samples import CellId, Row

STDERR_TAIL_CHARS = 4000
Message = dict[str, Any]
Worker = subprocess.Popen[str] | Forked
_server: ForkServer | None = None


def measure(run: Run, cells: list[Cell]) -> list[Row]:
    """Rows of all cells in order, measuring those that are not complete. CellError when any of them has failed."""
    identities = [CellId(cell.claim, cell.key, cell.block, run.profile.name) for cell in cells]
    if len(set(identities)) != len(identities):
        raise ValueError("two cells have the same claim, key and block")
    profiles.check_model(run.profile)
    missing = [i for i, cell in enumerate(cells) if not is_complete(run, cell)]
    if run.progress is not None and cells:
        run.progress.cells(cells[0].claim, *run.announce(identities, len(missing)))
    left = [cells[i] for i in missing if not take_over(run, cells[i])]
    failed = [result for result in run_cells(run, left) if result.status == "error"]
    if failed:
        others = f" (and {len(failed) - 1} more cells)" if len(failed) > 1 else ""
        raise CellError(f"{failed[0].error}{others}", usage=all(result.usage for result in failed))
    groups = [run.log.latest(identity) for identity in identities]
    return [row for group in groups if group is not None for row in run.log.rows(group)]


def is_complete(run: Run, cell: Cell) -> bool:
    """Whether the folder holds a valid group of this cell that depends on exactly what would be measured now."""
    group = run.log.latest(CellId(cell.claim, cell.key, cell.block, run.profile.name))
    return (
        group is not None and group.closing.get("status") == "ok" and group.closing.get("depends") == run.depends(cell)
    )


def run_cells(run: Run, cells: list[Cell]) -> Iterator[CellResult]:
    """Execute cells one after another, or all at once where the run has an executor of many; keep each as it ends."""
    if run.many is not None and cells:
        for cell, result in run.many(cells, run.profile, run):
            yield keep(run, cell, result)
        return
    for cell in cells:
        yield run_cell(run, cell)


def take_over(run: Run, cell: Cell) -> bool:
    """Keep the samples of another claim's cell that measured exactly this with exactly this code as this cell's, too;
    False when the run holds none.

    Claims that stand on one measurement share it within a run; run alone, each makes its own.
    """
    wanted = run.measures(cell)
    twin = next(
        (g for g in run.log.groups() if g.closing.get("measures") == wanted and g.cell.claim != cell.claim), None
    )
    if twin is None or twin.closing.get("status") != "ok":
        return False
    if run.progress is not None:
        run.progress.begin(cell)
    identity = CellId(cell.claim, cell.key, cell.block, run.profile.name)
    rows = [{name: value for name, value in row.items() if name not in STAMPED} for row in run.log.rows(twin)]
    own = {"sources": run.sources(cell.claim), "depends": run.depends(cell), "taken_from": twin.cell.claim}
    run.log.append(identity, run.stamp(identity, rows), _told(twin.closing) | own)
    result = CellResult("ok", rows, 0.0, int(twin.closing.get("peak_bytes", 0)))
    if run.progress is not None:
        run.progress.end(cell, result)
    return True


def _told(closing: Mapping[str, Any]) -> dict[str, Any]:
    """What a closing line says of the measurement itself, its seconds included."""
    names = ("status", "measures", "task", "params", "seconds", "peak_bytes", "worker")
    return {name: closing[name] for name in names if name in closing}


def run_cell(run: Run, cell: Cell) -> CellResult:
    """Execute one cell and append its group, good or bad."""
    if run.progress is not None:
        run.progress.begin(cell)
    executor = run.executor or run_local
    return keep(run, cell, executor(cell, run.profile, run))


def keep(run: Run, cell: Cell, result: CellResult) -> CellResult:
    """Append what a cell came to, good or bad; rows that cannot be stored make it an error."""
    identity = CellId(cell.claim, cell.key, cell.block, run.profile.name)
    try:
        rows = run.stamp(identity, result.rows)
        if result.status == "ok" and not rows:
            raise ValueError(f"cell {cell.key} yielded no rows")
    except ValueError as error:
        rows, result = [], CellResult("error", [], result.seconds, result.peak_bytes, str(error), stderr=result.stderr)
    closing = {
        "status": result.status,
        "sources": run.sources(cell.claim),
        "depends": run.depends(cell),
        "measures": run.measures(cell),
        "task": cell.task,
        "params": portable(cell.params),
        "seconds": round(result.seconds, 3),
        "peak_bytes": result.peak_bytes,
        "worker": dict(result.worker),
    }
    if result.status == "error":
        closing |= {"error": portable(result.error), "usage": result.usage, "stderr": portable(result.stderr)}
    run.log.append(identity, rows if result.status == "ok" else [], closing)
    if run.progress is not None:
        run.progress.end(cell, result)
    return result


def run_local(cell: Cell, profile: Profile, run: Run) -> CellResult:
    """The cell in a process of this machine, its progress shown by the run."""
    return measure_here(cell, profile, run.progress, may_fork=run.quick or not cell.fresh)


def measure_here(cell: Cell, profile: Profile, progress: Progress | None = None, may_fork: bool = False) -> CellResult:
    """The cell in a process of this machine, stopped with all its children at the cell's timeout or on an interrupt."""
    with tempfile.TemporaryFile() as stderr:
        begin = time.monotonic()
        process = _worker(profile, stderr, may_fork)
        try:
            result = _converse(process, cell, profile, progress, begin)
        finally:
            _kill_group(process)
        return _with_stderr(result, stderr) if result.status == "error" else result


def _worker(profile: Profile, stderr: IO[bytes], may_fork: bool) -> Worker:
    environment = worker_environment(profile)
    if may_fork and sys.platform == "linux" and profile.device == "cpu":
        with contextlib.suppress(Unavailable):
            return _fork_server(environment, profile).worker(stderr)
    _close_fork_server()  # whose weights are memory that a fresh process may need
    return subprocess.Popen(
        [sys.executable, "-m", "artifact.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=ROOT,
        env=environment,
        text=True,
        start_new_session=True,
    )


def _fork_server(environment: dict[str, str], profile: Profile) -> ForkServer:
    """The server of this process, started with the first cell that wants it."""
    global _server
    held = (profile.model, profile.dtype)
    if _server is None or not _server.serves(environment, held):
        _close_fork_server()
        _server = ForkServer(environment, str(ROOT), held)
    return _server


@atexit.register
def _close_fork_server() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def worker_environment(profile: Profile) -> dict[str, str]:
    """This environment with the thread counts that must be known before the interpreter starts."""
    from artifact.worker import THREAD_VARIABLES

    return os.environ | dict.fromkeys(THREAD_VARIABLES, str(profile.threads)) | {"PYTHONUNBUFFERED": "1"}


def worker_path() -> str:
    """What PYTHONPATH must be for a process elsewhere to import this checkout and whatever this process can."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _converse(process: Worker, cell: Cell, profile: Profile, progress: Progress | None, begin: float) -> CellResult:
    """Send the request and collect messages until the worker ends, fails or runs out of time."""
    request = {"task": cell.task, "params": cell.params, "threads": profile.threads}
    messages: queue.Queue[str | None] = queue.Queue()
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the worker was started without pipes")
    threading.Thread(target=_read_lines, args=(process.stdout, messages), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    rows: list[Row] = []
    last: Message = {}
    while True:
        try:
            line = messages.get(timeout=max(0.0, begin + cell.timeout_s - time.monotonic()))
        except queue.Empty:
            return _failed(f"no result after {cell.timeout_s:g} s, stopped", begin)
        if line is None:
            return _outcome(process, rows, last, begin)
        message = _parse(line)
        if "row" in message:
            rows.append(message["row"])
        elif "progress" in message and progress is not None:
            progress.update(float(message["progress"]), str(message.get("doing", "")))
        elif "done" in message or "error" in message:
            last = message


def _read_lines(stream: IO[str], messages: queue.Queue[str | None]) -> None:
    for line in stream:
        messages.put(line)
    messages.put(None)


def _parse(line: str) -> Message:
    try:
        message = json.loads(line)
    except ValueError:
        return {}  # half a line of a dying worker: its missing "done" tells the rest
    return message if isinstance(message, dict) else {}


def _outcome(process: Worker, rows: list[Row], last: Message, begin: float) -> CellResult:
    """Judge a worker whose output has ended: good only with its own count of rows and exit status 0."""
    try:
        # Its input stays open until it has ended: the end of the input would stop it in the middle of a clean exit.
        status = process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        return _failed("the worker closed its output but did not end", begin)
    if "error" in last:
        return _failed(str(last["error"]), begin, usage=bool(last.get("usage")))
    if status < 0:
        hint = "; the machine probably ran out of memory" if -status == signal.SIGKILL else ""
        return _failed(f"the worker was killed by signal {-status} ({signal.Signals(-status).name}){hint}", begin)
    if status != 0:
        return _failed(f"the worker ended with exit status {status}", begin)
    if last.get("done") != len(rows):
        return _failed(f"the worker ended after {len(rows)} rows without saying that it was done", begin)
    return CellResult("ok", rows, time.monotonic() - begin, int(last["peak_bytes"]), worker=last["worker"])


def _failed(reason: str, begin: float, usage: bool = False) -> CellResult:
    return CellResult("error", [], time.monotonic() - begin, 0, reason, usage)


def _with_stderr(result: CellResult, stderr: IO[bytes]) -> CellResult:
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - STDERR_TAIL_CHARS))
    tail = stderr.read().decode("utf-8", "replace")
    return CellResult("error", [], result.seconds, result.peak_bytes, result.error, result.usage, tail)


def _kill_group(process: Worker) -> None:
    """End the worker and whatever it has started. Its group outlives it, so the group is signalled first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
