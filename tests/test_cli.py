"""The command line: light to start, one sentence per mistake, documented exit codes, one JSON line at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from artifact import claim, cli, profiles, system
from artifact.cli import VERBS, main
from artifact.errors import UserError
from artifact.profiles import choose
from artifact.records import read_json
from artifact.verbs import doctor

ROOT = Path(__file__).parent.parent
HEAVY = {
    "torch",
    "numba",
    "transformers",
    "scipy",
    "matplotlib",
    "numpy",
    "pandas",
    "datasets",
    "jinja2",
    "rich",
    "psutil",
}


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["predict", "--help"], ["fetch", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Counted by modules, not by the clock: what is not imported cannot be slow."""
    code = (
        "import sys; from artifact.cli import main; code = main(sys.argv[1:]);"
        f"print('LOADED', *sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == "LOADED\n" and done.stdout


def test_verification_itself_starts_without_torch() -> None:
    """The parent of all workers stays small: the memory is theirs."""
    code = "import sys, artifact.verbs.verify, artifact.campaign; sys.exit(bool({'torch', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_verbs_stand_in_the_order_of_work_and_each_can_be_imported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n  {verb} ") for verb in VERBS]
    assert places == sorted(places)
    for verb in VERBS:
        assert main([verb, "--help"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify"], "Missing argument"),
        (["verify", "nope"], "no claim is called 'nope'"),
        (["verify", "byte_account", "--profile", "huge"], "huge"),
        (["verify", "byte_account", "--model", "/no/such/model.gguf"], "/no/such/model.gguf does not exist"),
        (["verify", "byte_account", "--text", "nope.txt"], "nope.txt does not exist"),
        (["verify", "byte_account", "--model", "a\0b"], "NUL"),
        (["verify", "byte_account", "--profile", "paper"], "needs the checkpoint"),
        (["verify", "byte_account", "--minutes", "-1"], "minutes"),
        (
            ["verify-all", "--paper", "crosover"],
            "of paper 'crosover'; there are catekv, crossover, sats, spark",
        ),
        (["tables", "nowhere"], "is no run folder"),
        (["show", "nowhere"], "neither a claim"),
        (["nope"], "No such command"),
        (["--nope"], "No such option"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_two(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_kernel_benchmark_takes_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "cuda_available", lambda: False)
    assert main(["bench", "kernels", "--device", "cpu", "-h"]) == 0 and "--context" in capsys.readouterr().out
    assert main(["bench", "kernels", "--device", "cuda"]) == 2 and "no usable CUDA GPU" in capsys.readouterr().err
    assert main(["bench", "kernels", "--bogus"]) == 2 and "--bogus" in capsys.readouterr().err


def test_verify_prints_a_card_and_one_json_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "byte_account", "--run", "here", "--profile", "embedded"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("byte_account" in line and "reproduced" in line for line in lines[:-1])
    assert json.loads(lines[-1]) == {"claims": {"byte_account": "reproduced"}, "exit_code": 0, "run": "here"}
    assert {path.name for path in Path("here").iterdir()} >= {"results.json", "samples.jsonl", "system.json", "tables"}
    written = "".join(p.read_text(errors="replace") for p in Path("here").rglob("*") if p.is_file())
    assert str(tmp_path) not in written and str(ROOT) not in written

    assert main(["verify", "byte_account", "--run", "here", "--profile", "embedded", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1

    assert main(["show", "here"]) == 0
    assert capsys.readouterr().out.count("reproduced") > 20
    assert main(["show", "here", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["claims"]["byte_account"]["verdict"] == "reproduced"


def test_a_new_run_gets_a_folder_under_runs_and_list_quotes_its_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "byte_account", "--profile", "embedded", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert main(["verify", "byte_account", "--run", "x", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"profile {choose().name} (") and captured.out.count("\n") == 1
    assert Path(run).parent == Path("runs") and Path(run).name.endswith("-embedded")
    assert main(["list", "--json"]) == 0
    (entry,) = [e for e in json.loads(capsys.readouterr().out) if e["name"] == "byte_account"]
    assert [(m["profile"], m["source"], m["verdict"]) for m in entry["measured"]] == [
        ("embedded", f"run {Path(run).name}", "reproduced")
    ]
    assert main(["list"]) == 0 and "needs nothing" in capsys.readouterr().out


def test_costs_of_a_full_run_can_be_shipped_and_are_listed_where_nothing_was_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run, extra in (("full", []), ("quick", ["--quick"])):
        assert main(["verify", "byte_account", "--run", run, "--profile", "embedded", "--json", *extra]) == 0
    monkeypatch.delenv("ARTIFACT_SECOND_MODEL", raising=False)
    assert main(["verify", "transfer", "--run", "full", "--profile", "embedded", "--json"]) == 3
    real = claim.folder
    (tmp_path / "claims").mkdir()
    monkeypatch.setattr(claim, "folder", lambda: tmp_path / "claims")
    monkeypatch.setattr(claim, "names", lambda: [path.stem for path in real().glob("byte*.py")])
    assert main(["list", "--ship", "quick"]) == 2
    assert main(["list", "--ship", "full"]) == 0
    assert list(read_json(tmp_path / "claims" / "measured.json")["claims"]) == ["byte_account"]  # the other was not run
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    ((measured,),) = [entry["measured"] for entry in json.loads(capsys.readouterr().out)]
    assert measured["source"].split(" threads of ")[0].isdigit() and measured["verdict"] == "reproduced"


def test_a_claim_file_runs_alone_from_any_folder(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "claims" / "byte_account.py"),
        "--quick",
        "--profile",
        "embedded",
        "--run",
        "r",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["claims"] == {"byte_account": "reproduced"}


def test_a_broken_table_costs_no_verdict_but_is_not_hidden(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paper_tables.contexts import table1

    monkeypatch.setattr(table1, "context", lambda *_: {})
    assert main(["verify", "byte_account", "--run", str(tmp_path / "r"), "--profile", "embedded"]) == 4
    out = capsys.readouterr().out
    assert (
        "table1 not made: UndefinedError" in out
        and json.loads(out.splitlines()[-1])["claims"]["byte_account"] == "reproduced"
    )
    assert (tmp_path / "r" / "errors" / "table-table1.txt").exists()


def test_doctor_names_versions_backend_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in report["checks"]}
    assert {"python", "packages", "embedded model", "memory", "disk", "cpu backend", "gpu backend"} <= set(checks)
    assert checks["attention"]["ok"] and "splitk: numba split-k" in checks["attention"]["found"]
    assert report["ready"] == (code == 0) and report["system"]["packages"]["torch"]
    for name in ("ray", "lm-eval"):  # extras: there, or with the command that adds them
        assert checks[name]["ok"] or checks[name]["fix"], checks[name]

    monkeypatch.setenv("ARTIFACT_DATA", "/nonexistent/data")
    assert main(["doctor"]) == 4
    shown = capsys.readouterr().out
    assert "MISS embedded model" in shown and ("fix: make setup" in shown or "fix: artifact fetch" in shown)


def test_doctor_describes_a_gpu_as_its_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"name": "NVIDIA H200", "driver_version": "580.1", "clocks.max.sm": "1980 MHz"}
    monkeypatch.setattr("artifact.gpu_state.sample", lambda: [{"free_mib": "143000"}])
    found = doctor.all_checks(system.describe() | {"gpus": [card, card]})
    shown = [check.found for check in found if check.name == "gpu"]
    assert shown[0] == "NVIDIA H200, driver 580.1, clocks up to 1980 MHz, 139.6 GiB free"
    assert shown[1] == "NVIDIA H200, driver 580.1, clocks up to 1980 MHz"  # the library saw one card alone


def test_an_interrupt_is_exit_code_130_and_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    monkeypatch.setattr(cli.group, "main", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert main([]) == 130 and signal.getsignal(signal.SIGTERM) is before
    assert "resume with --run" in capsys.readouterr().err


def test_profiles_fall_back_to_the_cpu_and_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profiles, "cuda_available", lambda: False)
    assert (choose().name, choose().device, choose().dtype) == ("embedded", "cpu", "float32")
    with pytest.raises(UserError, match="--profile embedded"):
        choose("gpu")
    monkeypatch.setattr(profiles, "cuda_available", lambda: True)
    assert (choose().name, choose().device, choose().dtype) == ("gpu", "cuda", "float16")
    assert choose("embedded").device == "cpu"
    assert choose("paper", model=str(tmp_path)).model == str(tmp_path)
