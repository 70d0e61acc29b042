"""Cells in real processes: every death is one cell's error, nothing finished is lost, a resumed run equals a whole."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_campaign import PROFILE

from artifact import campaign
from artifact.profiles import Profile
from artifact.records import STAMPED, Cell, CellError, CellResult, Run, errors_of, rows_of
from artifact.samples import SampleLog

TESTS = Path(__file__).parent
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def workers_find_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")
    complete = campaign.worker_environment

    def without_the_name_of_the_test(profile: Profile) -> dict[str, str]:
        """So that one fork server serves all tests."""
        return {name: value for name, value in complete(profile).items() if name != "PYTEST_CURRENT_TEST"}

    monkeypatch.setattr(campaign, "worker_environment", without_the_name_of_the_test)


@pytest.fixture(params=["started", "forked"], scope="module")
def fresh(request: pytest.FixtureRequest) -> bool:
    """Cells of both kinds: a fresh interpreter, or a fork of one that has loaded the libraries.

    Of the module, so that all of one kind run before the other: a fresh interpreter ends the fork server, and each that
    is started anew takes seconds.
    """
    return bool(request.param == "started")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path / "r", PROFILE) as opened:
        opened.start_claim("fake", TESTS / "fake_campaign.py")
        yield opened


def cell(
    key: str, task: str = "rows", timeout_s: float = PATIENCE_S, block: int = 0, fresh: bool = True, **params: Any
) -> Cell:
    return Cell("fake", key, f"fake_tasks:{task}", params, block, timeout_s, fresh)


def plain(path: Path) -> list[tuple[Any, ...]]:
    """What a run measured, without what no two runs share: times and process ids."""
    log = SampleLog(path / "samples.jsonl")
    kept = ("status", "depends", "sources", "task", "params", "rows")
    return [(g.cell, *(json.dumps(g.closing.get(k)) for k in kept), json.dumps(log.rows(g))) for g in log.groups()]


def wait_for(what: Path, process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not (what.exists() and what.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, f"{what.name} never appeared"
        time.sleep(0.02)
    return what.read_text()


def gone(pid: int) -> bool:
    """Whether a process ends within the time we are ready to wait; a zombie that nobody reaps has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_rows_come_back_in_order_with_their_columns_and_are_measured_once(run: Run, tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")
    cells = [cell("a", n=2, name="a", marks=marks), cell("a", block=1, n=1, name="a1", marks=marks)]
    rows = run.measure(cells)
    assert [(row["cell"], row["block"], row["i"], row["origin"], row["profile"]) for row in rows] == [
        ("a", 0, 0, "live", "embedded"),
        ("a", 0, 1, "live", "embedded"),
        ("a", 1, 0, "live", "embedded"),
    ]
    assert run.measure(cells) == rows == run.rows("fake")
    assert Path(marks).read_text().split() == ["a", "a1"]


def test_each_cell_has_a_process_of_its_own(run: Run, fresh: bool) -> None:
    run.measure([cell("a", fresh=fresh), cell("b", fresh=fresh)])
    workers = [group.closing["worker"]["pid"] for group in run.log.groups()]
    assert len(set(workers)) == 2 and os.getpid() not in workers
    assert all(group.closing["peak_bytes"] > 1e6 for group in run.log.groups())


@pytest.mark.parametrize(
    ("task", "params", "reason"),
    [
        ("leave", {"status": 7}, "exit status 7"),
        ("leave", {"status": 0}, "without saying that it was done"),
        ("killed", {}, r"signal 9 \(SIGKILL\); the machine probably ran out of memory"),
        ("raises", {}, "ArithmeticError: counted keep ratio 0.7 is not the requested 0.5"),
        ("out_of_memory", {}, "MemoryError: Unable to allocate"),
        ("nothing", {}, "yielded no rows"),
        ("reserved", {}, "reserved column 'origin'"),
        ("no_such_task", {}, "AttributeError"),
    ],
)
def test_a_cell_that_dies_is_its_own_error_and_the_others_finish(
    run: Run, task: str, params: dict[str, Any], reason: str, fresh: bool
) -> None:
    cells = [cell("before", fresh=fresh), cell("bad", task, fresh=fresh, **params), cell("after", fresh=fresh)]
    with pytest.raises(CellError, match=reason) as caught:
        run.measure(cells)
    assert not caught.value.usage
    assert {row["cell"] for row in run.rows("fake")} == {"before", "after"}
    ((recorded, usage),) = errors_of(run.log, "fake")
    assert recorded.startswith("cell bad: ") and not usage


def test_the_record_keeps_the_last_words_of_a_dead_worker(run: Run, fresh: bool) -> None:
    with pytest.raises(CellError):
        run.measure([cell("bad", "leave", fresh=fresh, status=7)])
    (group,) = run.log.groups()
    assert "last words on standard error" in group.closing["stderr"]


def test_a_users_mistake_inside_a_worker_stays_a_users_mistake(run: Run) -> None:
    with pytest.raises(CellError, match="run `make setup`") as caught:
        run.measure([cell("bad", "refuses")])
    assert caught.value.usage
    with pytest.raises(CellError) as caught:
        run.measure([cell("bad", "refuses"), cell("worse", "raises")])
    assert not caught.value.usage


def test_a_hanging_cell_is_stopped_with_its_children(run: Run, tmp_path: Path, fresh: bool) -> None:
    run.measure([cell("before", fresh=fresh)])
    child = tmp_path / "child"
    with pytest.raises(CellError, match="no result after 3 s"):
        run.measure([cell("hung", "hang", timeout_s=3.0, fresh=fresh, child=str(child)), cell("after", fresh=fresh)])
    assert {row["cell"] for row in run.rows("fake")} == {"before", "after"}
    assert gone(int(child.read_text()))


def test_a_failed_cell_is_measured_again_on_the_next_call(run: Run) -> None:
    with pytest.raises(CellError):
        run.measure([cell("a", "raises")])
    assert len(run.measure([cell("a", n=2)])) == 2
    assert errors_of(run.log, "fake") == []


def test_what_a_library_prints_is_never_taken_for_a_row(run: Run, fresh: bool) -> None:
    assert [row["i"] for row in run.measure([cell("a", "prints", fresh=fresh)])] == [0]


def test_thread_counts_are_set_before_anything_heavy_is_imported(run: Run, fresh: bool) -> None:
    (row,) = run.measure([cell("a", "environment", fresh=fresh)])
    assert {row[name] for name in row if name.endswith("_THREADS")} == {"1"} and row["torch"] == 1


def test_rows_hold_no_path_of_this_machine(run: Run) -> None:
    (row,) = run.measure([cell("a", "path", root=str(TESTS.parent))])
    assert row["file"] == "kernels/gemv.py" and row["home"] == "~"
    assert str(TESTS.parent) not in (run.path / "samples.jsonl").read_text()


def test_a_stale_cell_is_not_reused_after_an_edit(run: Run, tmp_path: Path) -> None:
    source, marks = tmp_path / "claim.py", tmp_path / "marks"
    for text in ("one", "two", "two"):
        source.write_text(text)
        run.start_claim("fake", source)
        run.measure([cell("a", name=text, marks=str(marks))])
    assert marks.read_text().split() == ["one", "two"]
    assert len(run.rows("fake")) == 3


def test_twins_are_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="same claim, key and block"):
        run.measure([cell("a"), cell("a", n=5)])


def start(path: Path, cells: list[dict[str, Any]]) -> subprocess.Popen[str]:
    command = [sys.executable, str(TESTS / "fake_campaign.py"), str(path), json.dumps(cells)]
    # A test run that was started in the background ignores interrupts, and so would what it starts.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True, preexec_fn=heed)


def as_json(key: str, task: str = "rows", **params: Any) -> dict[str, Any]:
    return {"key": key, "task": f"fake_tasks:{task}", "params": params, "timeout_s": PATIENCE_S}


def test_cells_of_a_full_run_that_ask_for_it_start_anew_and_all_others_are_forked(tmp_path: Path) -> None:
    found = {}
    for quick in (False, True):
        with Run(tmp_path / str(quick), PROFILE, quick) as run:
            run.start_claim("fake", TESTS / "fake_campaign.py")
            for fresh in (True, False):
                (found[quick, fresh],) = run.measure([cell(f"{fresh}", "origins", fresh=fresh)])
    started = found.pop((False, True))
    assert started["parent"] == os.getpid() and not started["loaded"]
    (server,) = {row["parent"] for row in found.values()}
    assert server != os.getpid() and all(row["loaded"] for row in found.values())


def test_forked_workers_outlive_neither_their_server_nor_a_change_of_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def origin(key: str) -> dict[str, Any]:
        (row,) = run.measure([cell(key, "origins", fresh=False)])
        return row

    first = origin("a")
    os.kill(first["parent"], signal.SIGKILL)
    assert gone(first["parent"])
    second = origin("b")
    assert second["loaded"] and second["parent"] != first["parent"] and origin("c")["parent"] == second["parent"]
    monkeypatch.setenv("COLUMNS", "77")
    third = origin("d")
    assert third["columns"] == "77" and third["parent"] != second["parent"] and gone(second["parent"])


def test_forks_come_with_the_model_of_the_run_and_another_model_has_another_server(tmp_path: Path, tiny: Any) -> None:
    found = []
    for number, name in enumerate(("llama", "llama", "qwen3")):
        path = str(tiny(name).path)
        with Run(tmp_path / f"{number}", replace(PROFILE, model=path)) as run:
            run.start_claim("fake", TESTS / "fake_campaign.py")
            found += run.measure([cell("forked", "loads", fresh=False, model=path)])
            found += run.measure([cell("fresh", "loads", fresh=True, model=path)]) if number == 2 else []
    first, again, other, started = found
    assert [row["held"] for row in found] == [1, 1, 1, 0] and all(row["right"] for row in found)
    assert again == first and other["parent"] != first["parent"] and started["parent"] == os.getpid()
    assert other["identity"] == started["identity"] != first["identity"]


@pytest.mark.parametrize("victim", ["parent", "worker", "interrupt", "terminate"])
def test_killed_anywhere_the_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, victim: str, fresh: bool) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    held = as_json("b", "held", started=str(started), release=str(release))
    cells = [one | {"fresh": fresh} for one in (as_json("a"), held, as_json("c"))]
    parent = start(tmp_path / "r", cells)
    worker = int(wait_for(started, parent))
    server = psutil.Process(worker).ppid()  # the campaign itself where workers are started
    if victim == "worker":
        os.kill(worker, signal.SIGKILL)
    else:
        chosen = {"parent": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}[victim]
        os.kill(parent.pid, chosen)
    _, complaint = parent.communicate(timeout=PATIENCE_S)
    expected = {"parent": -signal.SIGKILL, "worker": 1, "interrupt": 130, "terminate": 130}[victim]
    assert parent.returncode == expected, complaint
    assert gone(worker) and gone(server)
    assert ("Traceback" in complaint) == (victim == "worker")
    assert rows_of(SampleLog(tmp_path / "r" / "samples.jsonl"), "fake")[0]["cell"] == "a"

    release.touch()
    resumed, whole = start(tmp_path / "r", cells), start(tmp_path / "whole", cells)
    assert resumed.communicate(timeout=PATIENCE_S)[0] == whole.communicate(timeout=PATIENCE_S)[0] == "8\n"
    assert plain(tmp_path / "r") == plain(tmp_path / "whole") or victim == "worker"
    assert sorted(map(str, plain(tmp_path / "r"))) == sorted(map(str, plain(tmp_path / "whole")))


def test_two_runs_on_one_folder(tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    cells = [as_json("a", "held", started=str(started), release=str(release))]
    first = start(tmp_path / "r", cells)
    wait_for(started, first)
    second = start(tmp_path / "r", cells)
    _, complaint = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2 and f"process {first.pid}" in complaint and complaint.count("\n") == 1
    release.touch()
    assert first.communicate(timeout=PATIENCE_S)[0] == "2\n" and first.returncode == 0


def test_truncated_samples_are_measured_again_and_only_those(run: Run, tmp_path: Path) -> None:
    marks = str(tmp_path / "marks")
    cells = [cell(key, name=key, marks=marks) for key in "abc"]
    run.measure(cells)
    before = plain(run.path)
    run.close()
    file = run.path / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-100])
    with Run(run.path, PROFILE) as again:
        again.start_claim("fake", TESTS / "fake_campaign.py")
        again.measure(cells)
    assert plain(run.path) == before
    assert Path(marks).read_text().split() == ["a", "b", "c", "c"]


class Watcher:
    """A progress view that remembers what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def cells(self, claim: str, total: int, done: int) -> None:
        self.seen.append(("cells", claim, total, done))

    def begin(self, cell: Cell) -> None:
        self.seen.append(("begin", cell.key))

    def update(self, fraction: float, doing: str) -> None:
        self.seen.append(("update", fraction, doing))

    def end(self, cell: Cell, result: CellResult) -> None:
        self.seen.append(("end", cell.key, result.status))

    def close(self) -> None:
        self.seen.append(("close",))


def test_progress_counts_a_claims_cells_over_all_its_calls(run: Run) -> None:
    run.progress = watcher = Watcher()
    run.expect(3)
    run.measure([cell("a", n=1)])
    run.measure([cell("a", n=1), cell("b", n=1)])
    run.measure([cell("c", n=1), cell("d", n=1)])
    assert [seen[2:] for seen in watcher.seen if seen[0] == "cells"] == [(3, 0), (3, 1), (4, 2)]


def test_progress_says_what_runs_and_how_much_was_kept(run: Run) -> None:
    run.measure([cell("a")])
    run.progress = watcher = Watcher()
    run.measure([cell("a"), cell("b", n=2)])
    assert watcher.seen == [
        ("cells", "fake", 2, 1),
        ("begin", "b"),
        ("update", 0.0, "row 0"),
        ("update", 0.5, "row 1"),
        ("end", "b", "ok"),
    ]


def other(key: str, task: str = "rows", block: int = 0, **params: Any) -> Cell:
    return Cell("other", key, f"fake_tasks:{task}", params, block, PATIENCE_S)


def test_a_claim_takes_over_what_another_one_measured_exactly_so(run: Run) -> None:
    run.start_claim("other", TESTS / "fake_campaign.py")
    first = run.measure([cell("a", count=3, block=1)])
    second = run.measure([other("b", count=3, block=1)])
    group = run.log.groups("other")[0]
    assert group.closing["taken_from"] == "fake" and group.closing["depends"] == run.depends(
        other("b", count=3, block=1)
    )
    assert group.closing["worker"] == run.log.groups("fake")[0].closing["worker"]
    free = [{name: value for name, value in row.items() if name not in STAMPED} for row in (*first, *second)]
    assert free[:3] == free[3:] and {row["claim"] for row in second} == {"other"}
    assert {row["cell"] for row in rows_of(run.log, "other")} == {"b"}


@pytest.mark.parametrize(("key", "block", "count"), [("a", 2, 3), ("a", 1, 4)])
def test_another_block_or_parameter_is_measured(run: Run, key: str, block: int, count: int) -> None:
    run.start_claim("other", TESTS / "fake_campaign.py")
    run.measure([cell("a", count=3, block=1)])
    run.measure([other(key, count=count, block=block)])
    assert "taken_from" not in run.log.groups("other")[0].closing


def test_samples_of_other_code_or_of_a_failed_cell_are_not_taken_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start_claim("other", TESTS / "fake_campaign.py")
    run.measure([cell("a", count=3)])
    run._sources[""] = "edited"
    run.measure([other("b", count=3)])
    assert "taken_from" not in run.log.groups("other")[0].closing
    with pytest.raises(CellError):
        run.measure([cell("c", task="raises")])
    with pytest.raises(CellError):
        run.measure([other("c", task="raises")])
    assert "taken_from" not in next(g for g in run.log.groups("other") if g.cell.key == "c").closing
