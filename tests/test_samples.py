"""The samples file: only complete, unaltered groups are trusted, whatever happened to the file."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.errors import UserError
from artifact.samples import CellId, SampleLog, encode, scan

A, B, C = (CellId("fake", key, 0, "embedded") for key in "abc")
OK = {"status": "ok", "sources": "s1", "depends": "d1"}


def written(path: Path, *cells: CellId) -> SampleLog:
    log = SampleLog(path, writable=True)
    for cell in cells:
        log.append(cell, [{"i": i, "cell": cell.key, "text": "\u2028 é \n"} for i in range(3)], OK)
    return log


def test_rows_survive_a_round_trip_with_nan_and_every_kind_of_text(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "s", writable=True)
    rows = [{"x": math.nan, "y": math.inf, "t": '\r\n\u2028"closed": true', "nested": {"closed": True}}, {"x": 0.1}]
    log.append(A, rows, OK)
    again = SampleLog(tmp_path / "s")
    back = again.rows(again.groups()[0])
    assert math.isnan(back[0]["x"]) and back[0]["y"] == math.inf
    assert [row | {"x": 0} for row in back] == [row | {"x": 0} for row in rows]


def test_cut_at_any_byte_the_file_gives_exactly_the_finished_cells(tmp_path: Path) -> None:
    """Power cut: for every length of the file, the trusted groups are those that were wholly on disk."""
    path = tmp_path / "s"
    written(path, A, B)
    whole = path.read_bytes()
    ends = [*[group.offset for group in scan(path)[0]][1:], len(whole)]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert len(scan(path)[0]) == sum(end <= cut for end in ends), cut


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_half_written_tail_is_cut_off_and_the_resumed_file_equals_an_uninterrupted_one(
    tmp_path: Path, cut: int
) -> None:
    whole = tmp_path / "whole"
    written(whole, A, B)
    broken = tmp_path / "broken"
    broken.write_bytes(whole.read_bytes()[:-cut])
    log = SampleLog(broken, writable=True)
    assert [group.cell for group in log.groups()] == [A]
    written(broken, B)
    assert broken.read_bytes() == whole.read_bytes()


def test_a_reader_never_changes_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    written(path, A, B)
    path.write_bytes(path.read_bytes()[:-9])
    before = path.read_bytes()
    assert SampleLog(path).dropped_lines > 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("edit", [(b'"i":1', b'"i":7'), (b'"rows":3', b'"rows":2'), (b'"sha256":"', b'"sha256":"0')])
def test_a_hand_edited_group_is_not_trusted_and_its_neighbours_are(tmp_path: Path, edit: tuple[bytes, bytes]) -> None:
    path = tmp_path / "s"
    written(path, A, B, C)
    groups = scan(path)[0]
    data = path.read_bytes()
    start, end = groups[1].offset, groups[2].offset
    path.write_bytes(data[:start] + data[start:end].replace(edit[0], edit[1], 1) + data[end:])
    log = SampleLog(path, writable=True)
    assert [group.cell for group in log.groups()] == [A, C]
    assert log.latest(B) is None and log.dropped_lines == 4


def test_rows_without_a_closing_line_do_not_join_the_next_cell(tmp_path: Path) -> None:
    path = tmp_path / "s"
    written(path, A)
    with path.open("ab") as file:
        file.write(encode({"i": 0, "cell": "b"}))
    log = written(path, C)
    assert [len(log.rows(group)) for group in SampleLog(path).groups()] == [3, 3]


def test_the_newest_group_of_a_cell_wins_and_older_sources_are_left_out(tmp_path: Path) -> None:
    log = written(tmp_path / "s", A, B)
    log.append(A, [{"i": 9}], {**OK, "sources": "s2"})
    for view in (log, SampleLog(tmp_path / "s")):
        assert [(g.cell, view.rows(g)) for g in view.groups("fake")] == [(A, [{"i": 9}])]


def test_a_file_that_changes_under_a_reader_is_noticed(tmp_path: Path) -> None:
    log = written(tmp_path / "s", A)
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes().replace(b'"i":1', b'"i":8', 1))
    with pytest.raises(ValueError, match="changed while"):
        log.rows(log.groups()[0])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_invents_or_alters_a_cell(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any replaced span: every group that is still trusted is one of those written, with its own rows."""
    path = tmp_path_factory.mktemp("damage") / "s"
    written(path, A, B, C)
    whole = path.read_bytes()
    truth = {group.cell: whole[group.offset : group.offset + group.length] for group in scan(path)[0]}
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    path.write_bytes(whole[:start] + data.draw(st.binary(max_size=60)) + whole[stop:])
    damaged = path.read_bytes()
    for group in scan(path)[0]:
        assert damaged[group.offset : group.offset + group.length] == truth[group.cell]


@pytest.mark.parametrize(
    "line",
    [
        b'{"closed":true,"claim":"\\ud800","cell":"a","block":0,"profile":"p","rows":0}',
        b'{"closed":true}',
        b'{"closed":true,"rows":0}',
        b"[" * 100_000 + b'"closed":',
        b'"closed":',
        b'\xff\xfe"closed":',
        b"",
    ],
)
def test_foreign_lines_are_dropped_without_an_exception(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "s"
    path.write_bytes(line + b"\n")
    written(path, A)
    assert [group.cell for group in SampleLog(path).groups()] == [A]


def test_a_full_disk_is_one_sentence_and_leaves_the_finished_cells(tmp_path: Path) -> None:
    """A limit on the file size stands in for the disk: the second cell does not fit, the first one stays valid."""
    path = tmp_path / "s"
    written(path, A)
    size = path.stat().st_size
    code = f"""
import resource, signal
from pathlib import Path
from artifact.errors import UserError
from artifact.samples import CellId, SampleLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = SampleLog(Path({str(path)!r}), writable=True)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size} + 50, {size} + 50))
try:
    log.append(CellId("fake", "b", 0, "embedded"), [{{"i": i}} for i in range(100)], {{"status": "ok"}})
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be written" in done.stdout and "resume with --run" in done.stdout
    assert path.stat().st_size == size
    assert [group.cell for group in SampleLog(path).groups()] == [A]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != size + 50


def test_a_reader_cannot_append(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="opened for reading"):
        SampleLog(tmp_path / "s").append(A, [{"i": 0}], OK)


def test_lines_are_sorted_and_compact() -> None:
    line = encode({"b": 1, "a": [1, 2]})
    assert line == b'{"a":[1,2],"b":1}\n' and json.loads(line) == {"a": [1, 2], "b": 1}
    with pytest.raises(TypeError):
        encode({"x": UserError("not JSON")})
