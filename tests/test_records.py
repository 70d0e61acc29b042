"""Run folders: one writer, the same options on resume, nothing private, nothing newer than this version."""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from artifact import depends, portable, system
from artifact.errors import UserError
from artifact.profiles import Profile, from_record, to_record
from artifact.records import Cell, Run, new_run_path, read_json, write_json

PROFILE = Profile("embedded", "none", "cpu", "float32", None, 2)


def opened(path: Path, profile: Profile = PROFILE) -> Run:
    run = Run(path, profile)
    run.start_claim("fake", Path(__file__))
    return run


def test_a_second_writer_is_refused_with_the_first_ones_process_id(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from artifact.profiles import Profile; from artifact.records import Run;"
        f"run = Run(Path({str(tmp_path / 'r')!r}), Profile('embedded', 'none', 'cpu', 'float32', None, 2));"
        "print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=f"is being written by process {other.pid}"):
            Run(tmp_path / "r", PROFILE)
        other.communicate()
    with Run(tmp_path / "r", PROFILE):
        pass  # the lock died with its holder


def test_a_refused_writer_leaves_the_folder_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "r") as run:
        run.record("fake", "a", [{"x": 1}])
        before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}
        with pytest.raises(UserError):
            Run(tmp_path / "r", PROFILE)
        assert {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before


@pytest.mark.parametrize("change", [{"model": "other"}, {"name": "paper"}, {"text": "b.txt"}, {"dtype": "float16"}])
def test_a_run_is_resumed_only_with_what_it_was_started_with(tmp_path: Path, change: dict[str, str]) -> None:
    Run(tmp_path / "r", PROFILE).close()
    with pytest.raises(UserError, match=f"was started with {next(iter(change))}"):
        Run(tmp_path / "r", replace(PROFILE, **change))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="was started with quick False"):
        Run(tmp_path / "r", PROFILE, quick=True)
    Run(tmp_path / "r", PROFILE).close()  # the refused ones gave their locks back


def test_samples_of_a_stranger_are_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"no run\.json"):
        Run(tmp_path, PROFILE)
    assert (tmp_path / "samples.jsonl").read_text() == "{}\n"


def test_recorded_rows_are_stored_once_and_again_when_they_change(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        rows = run.record("fake", "a", [{"x": 1.5}, {"x": 2.5}])
        size = (tmp_path / "samples.jsonl").stat().st_size
        assert run.record("fake", "a", [{"x": 1.5}, {"x": 2.5}]) == rows == run.rows("fake")
        assert (tmp_path / "samples.jsonl").stat().st_size == size
        run.record("fake", "a", [{"x": 3.5}])
        assert [row["x"] for row in run.rows("fake")] == [3.5]
        assert run.rows("fake")[0].items() >= {"claim": "fake", "cell": "a", "block": 0, "origin": "live"}.items()


@pytest.mark.parametrize("row", [{"origin": "recorded"}, {"claim": "other"}, {"closed": True}])
def test_a_row_cannot_pass_for_another_claim_or_origin(tmp_path: Path, row: dict[str, object]) -> None:
    with opened(tmp_path) as run, pytest.raises(ValueError, match="reserved"):
        run.record("fake", "a", [row])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": 99}', "update the artifact"),
        ("{", "cannot be read as JSON"),
        ("[]", "no schema version"),
        ('{"schema": true}', "no schema version"),
        ("[" * 100_000, "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
    ],
)
def test_a_damaged_or_newer_record_is_one_sentence(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_json(file)
    with pytest.raises(UserError, match=r"results\.json is missing"):
        read_json(tmp_path / "no" / "results.json")


@pytest.mark.parametrize("damage", [{"threads": "two"}, {"device": "tpu"}, {"text": 3}])
def test_a_damaged_profile_is_one_sentence(damage: dict[str, object]) -> None:
    assert from_record(to_record(PROFILE)) == PROFILE
    with pytest.raises(UserError, match=r"run\.json"):
        from_record({**to_record(PROFILE), **damage})
    with pytest.raises(UserError, match=r"run\.json"):
        from_record({})


def test_json_records_are_sorted_strict_and_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"b": 1, "a": 2})
    assert file.read_text() == '{\n  "a": 2,\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="Out of range"):
        write_json(file, {"a": float("nan")})
    assert json.loads(file.read_text()) == {"a": 2, "b": 1} and list(tmp_path.iterdir()) == [file]


def test_run_names_are_readable_and_never_reused(tmp_path: Path) -> None:
    now = time.strptime("2025-01-02 03:04:05", "%Y-%m-%d %H:%M:%S")
    first = new_run_path(tmp_path, "embedded", now)
    assert first.name == "20250102-030405-embedded"
    first.mkdir()
    assert new_run_path(tmp_path, "embedded", now).name == "20250102-030405-embedded-2"


def test_paths_users_and_hosts_stay_out_of_what_is_written() -> None:
    home, root = str(Path.home()), str(portable.ROOT)
    text = f'File "{root}/kernels/gemv.py", {home}/.cache/x {home} {sys.prefix}/lib/y /srv/data/model.gguf'
    text += " https://a.b/c/d 1/2/3"
    cut = portable.text(text)
    assert root not in cut and home not in cut.replace("https://", "") and "/srv" not in cut
    assert 'File "kernels/gemv.py"' in cut and "https://a.b/c/d" in cut and "1/2/3" in cut and ".../model.gguf" in cut


def test_the_system_record_names_hardware_and_nobody() -> None:
    record = system.describe()
    text = json.dumps(record)
    for private in (platform.node(), getpass.getuser(), str(Path.home()), str(portable.ROOT)):
        words = text.replace('"', " ").replace("/", " / ").split()
        assert private not in words and (len(private) < 6 or private not in text), private
    assert record["memory_bytes"] > 1e9 and record["cpu"]["logical_cores"] >= record["cpu"]["usable_threads"] >= 1
    assert record["packages"]["numpy"] and record["python"]["version"] == platform.python_version()
    assert record == system.describe()


def test_a_dirty_or_missing_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "ROOT", tmp_path)
    assert system.commit() is None
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "a").write_text("1")
    for arguments in (["init", "-q"], ["add", "a"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True, env=environment)
    assert len(system.commit() or "") == 40
    (tmp_path / "a").write_text("2")
    assert system.commit() is None


def test_editing_any_measuring_source_changes_the_hash(tmp_path: Path) -> None:
    for name in (
        "artifact/engine/decoder.py",
        "artifact/cli.py",
        "artifact/kv/snapkv.py",
        "kernels/cpu/gemv.py",
        "claims/c.py",
        "claims/_c.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    model = tmp_path / "m.gguf"
    model.write_text("weights")

    def digest() -> str:
        return depends.sources_hash(tmp_path / "claims/c.py", tmp_path, [model])

    start = digest()
    for name in (
        "artifact/engine/decoder.py",
        "artifact/kv/snapkv.py",
        "kernels/cpu/gemv.py",
        "claims/c.py",
        "claims/_c.py",
        "m.gguf",
    ):
        (tmp_path / name).write_text("edited")
        assert digest() != start, name
        start = digest()
    (tmp_path / "artifact/cli.py").write_text("edited")
    assert digest() == start
    (tmp_path / "kernels/new.py").write_text("1")
    assert digest() != start


def test_the_hash_of_a_large_file_is_kept_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARTIFACT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(depends, "LARGE_BYTES", 1)
    monkeypatch.setattr(depends, "_file_hashes", {})
    file = tmp_path / "w"
    file.write_text("one")
    first = depends.file_hash(file)
    (kept,) = (tmp_path / "data" / "hashes").iterdir()
    kept.write_text("seen")
    depends._file_hashes.clear()
    assert depends.file_hash(file) == "seen"
    file.write_text("two!")
    assert depends.file_hash(file) not in ("seen", first)


def test_a_cells_hash_covers_parameters_task_and_profile(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as run, opened(tmp_path / "b", replace(PROFILE, threads=1)) as other:
        cell = Cell("fake", "a", "m:f", {"n": 1})
        changed = [replace(cell, params={"n": 2}), replace(cell, task="m:g")]
        hashes = {run.depends(cell), other.depends(cell), *(run.depends(c) for c in changed)}
        assert len(hashes) == 4 and run.depends(replace(cell, timeout_s=1.0)) == run.depends(cell)
