"""artifact report, compare, tables --recorded and docs, and what verify writes at its end."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from artifact.cli import main
from artifact.errors import UserError
from artifact.records import Run
from artifact.report import docs, pdf
from artifact.report.stored import open_run
from artifact.report.write import write_tables
from artifact.verify import derive
from paper_tables import recorded
from paper_tables.render import table_names
from tests import faults, run_folder

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder.make(tmp_path_factory.mktemp("runs") / "r", ("byte_account", "crossover"))


@pytest.fixture
def machine(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded machine `gpu-a` made of that run, samples compressed; the working directory is a fresh one."""
    folder = tmp_path / "recorded" / "gpu-a"
    folder.mkdir(parents=True)
    for name in ("run.json", "system.json"):
        shutil.copyfile(run / name, folder / name)
    (folder / "samples.jsonl.gz").write_bytes(gzip.compress((run / "samples.jsonl").read_bytes(), mtime=0))
    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")
    monkeypatch.chdir(tmp_path)
    return folder


def test_verify_ends_with_page_figures_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "r"
    assert main(["verify", "byte_account", "--run", str(folder), "--profile", "embedded"]) == 0
    out = capsys.readouterr().out
    assert "report.html" in out and "figure1.pdf" in out
    assert "figures of claims that this run does not hold" in out and "not made: no samples" not in out
    names = {path.name for path in folder.iterdir()}
    assert {"report.html", "junit.xml", "codecheck.yml", "ro-crate-metadata.json", "test-result.intoto.json"} <= names
    assert json.loads(out.splitlines()[-1])["exit_code"] == 0
    before = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file() and name != ".lock"}
    assert main(["report", str(folder)]) == 0
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_a_report_that_fails_costs_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from artifact.report import html

    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("page")

    monkeypatch.setattr(html, "render", broken)
    folder = tmp_path / "r"
    assert main(["verify", "byte_account", "--run", str(folder), "--profile", "embedded"]) == 0
    assert "report.html not made: ZeroDivisionError: page" in capsys.readouterr().out
    assert (folder / "junit.xml").is_file() and "broken" in (folder / "errors" / "report-report.txt").read_text()


def test_tables_of_a_recorded_machine_are_marked_recorded_and_the_same_each_time(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["tables", "--recorded", "gpu-a"]) == 0
    out = Path("runs") / "recorded-gpu-a" / "tables"
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(first) == {"table1.tex", "table2.tex"}
    body = (out / "table2.tex").read_text().split(r"\midrule")[1]
    assert r"\fromrecorded{" in body and r"\fromlive{" not in body
    assert main(["tables", "--recorded", "gpu-a"]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert [path.name for path in machine.iterdir()].count("results.json") == 0  # what is shipped is only read


def test_without_a_run_the_recorded_tables_are_printed_and_nothing_is_written(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARTIFACT_RUNS", str(machine.parent / "none"))
    before = sorted(Path().iterdir())
    assert main(["tables"]) == 0
    said = capsys.readouterr()
    assert "% gpu-a: table2.tex" in said.out and r"\fromrecorded{" in said.out and r"\fromlive{4" not in said.out
    assert "no run in" in said.err and sorted(Path().iterdir()) == before
    assert main(["tables"]) == 0 and capsys.readouterr().out == said.out


def test_without_a_name_the_newest_run_is_rendered(
    machine: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("20250101-000000-embedded", "20250301-000000-embedded"):
        shutil.copytree(run, tmp_path / "kept" / name)
    (tmp_path / "kept" / "recorded-h200").mkdir()
    monkeypatch.setenv("ARTIFACT_RUNS", str(tmp_path / "kept"))
    assert main(["tables"]) == 0
    assert "20250301-000000-embedded/tables/table2.tex" in capsys.readouterr().out
    assert main(["tables", "20250101-000000-embedded"]) == 0
    assert "20250101-000000-embedded/tables/table2.tex" in capsys.readouterr().out


def test_a_machine_with_several_models_gives_the_tables_of_each(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(machine, machine.parent / "box" / "a")
    shutil.copytree(machine, machine.parent / "box" / "b")
    assert main(["tables", "--recorded", "box"]) == 0
    out = capsys.readouterr().out
    assert "recorded-box/a/tables/table2.tex" in out and "recorded-box/b/tables/table2.tex" in out


def test_an_unknown_machine_or_a_missing_record_is_one_sentence(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tables", "--recorded", "h999"]) == 2
    assert "no run is recorded for 'h999'; under paper_tables/recorded there are: gpu-a" in capsys.readouterr().err
    assert main(["tables", "r", "--recorded", "gpu-a"]) == 2
    (machine / "system.json").unlink()
    assert main(["tables", "--recorded", "gpu-a"]) == 2
    assert "lacks system.json" in capsys.readouterr().err


def test_the_page_shows_recorded_values_beside_live_ones(machine: Path, run: Path) -> None:
    from artifact.report import html

    text = html.render(open_run(run))
    assert "Recorded</th>" in text and re.search(r"gpu-a: -?[\d.]+ tokens \[", text)


def test_compare_shows_what_differs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run_folder.make(tmp_path / "other", ("byte_account",))
    system = json.loads((other / "system.json").read_text())
    system["cpu"]["model"], system["packages"]["torch"] = "Another CPU", "2.14.0"
    (other / "system.json").write_text(json.dumps(system))
    assert main(["compare", str(run), str(other)]) == 0
    out = capsys.readouterr().out
    assert "cpu.model: Example CPU <8-Core>  |  Another CPU" in out and "packages.torch: 2.13.0  |  2.14.0" in out
    assert "memory_bytes" not in out and "crossover: reproduced  |  absent" in out and "agree exactly" in out
    assert main(["compare", str(run), str(other), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert set(compared["system"]) == {"cpu.model", "packages.torch"} and compared["settings"] == {}
    rows = compared["claims"]["byte_account"]
    assert all(row["ratio"] in (None, 1) for row in rows[1:]) and len(rows) > 10


def test_compare_takes_recorded_machines_and_names_what_it_cannot_find(
    machine: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(run), "gpu-a"]) == 0
    assert "system: the same" in capsys.readouterr().out
    assert main(["compare", str(run), "nowhere"]) == 2
    assert "nowhere is neither a run folder nor a recorded machine (gpu-a)" in capsys.readouterr().err


def test_a_pdf_without_latex_is_one_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pdf, "ENGINE", "no-such-latex")
    assert main(["report", str(run), "--pdf"]) == 2
    assert "apt-get install texlive-latex-recommended" in capsys.readouterr().err
    assert (run / "report.html").is_file()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_the_pdf_compiles_to_the_same_bytes(run: Path) -> None:
    try:
        first = pdf.write_pdf(run).read_bytes()
    except UserError as missing:
        pytest.skip(str(missing))
    assert first.startswith(b"%PDF") and pdf.write_pdf(run).read_bytes() == first


@pytest.mark.skipif(shutil.which(pdf.ENGINE) is None, reason="pdflatex is not installed here")
def test_the_pdf_holds_a_table_of_every_template(tmp_path: Path) -> None:
    """Whatever a table needs of LaTeX, the document has; the rows are the controls of the seeded faults."""
    folder = run_folder.make(tmp_path / "all", ("byte_account",), judged=False)
    with Run(folder, run_folder.PROFILE) as opened:
        for suite in faults.suites():
            if suite.claim != "byte_account":
                rows = [
                    {"text": "simulated", "context": 4096, "scored": 4, "cell": "simulated", "block": 0, **row}
                    for row in suite.honest()
                ]
                opened.start_claim(suite.claim, Path(faults.__file__))
                for key, block in sorted({(row["cell"], row["block"]) for row in rows}):
                    own = [row for row in rows if (row["cell"], row["block"]) == (key, block)]
                    opened.record(suite.claim, key, own, block)
    derive(folder)
    written, skipped, sound = write_tables(folder)
    assert sound and not skipped and {file.stem for file in written} == set(table_names())
    assert pdf.write_pdf(folder).stat().st_size > 50_000


def test_the_document_inputs_nothing_that_a_record_asks_for(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    shutil.copytree(run, folder)
    results = json.loads((folder / "results.json").read_text())
    results["claims"]["byte_account"]["reason"] = r"\input{/etc/passwd} \write18{x} – ≤ 漢 100%"
    (folder / "results.json").write_text(json.dumps(results))
    text = pdf.document(open_run(folder))
    assert r"\input{/etc" not in text and r"\write18" not in text and "漢" not in text and r"100\%" in text


def test_reproduce_holds_the_numbered_findings_of_the_recorded_gpu() -> None:
    section = docs.h200_list([])
    assert [int(line.split(".")[0]) for line in section.splitlines() if not line.startswith("   ")] == list(
        range(1, 11)
    )
    assert section in (docs.ROOT / "REPRODUCE.md").read_text(encoding="utf-8")


def test_generated_documentation_is_up_to_date() -> None:
    """After a change of a claim: `artifact docs`."""
    assert docs.out_of_date() == []


def test_drift_is_noticed_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPRODUCE.md", "pyproject.toml", "CITATION.cff", "codemeta.json"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / docs.APPENDIX, tmp_path / docs.APPENDIX)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"docs/h200\.md has no numbered findings"):
        docs.generated(tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copyfile(ROOT / "docs" / "h200.md", tmp_path / "docs" / "h200.md")
    text = (tmp_path / "REPRODUCE.md").read_text()
    (tmp_path / "REPRODUCE.md").write_text(
        text.replace("`artifact verify crossover` |", "`artifact verify crossing` |")
    )
    assert docs.out_of_date(tmp_path) == [Path("REPRODUCE.md")]
    for path, content in docs.generated(tmp_path).items():
        (tmp_path / path).write_text(content)
    assert (tmp_path / "REPRODUCE.md").read_text() == text and docs.out_of_date(tmp_path) == []
    (tmp_path / "REPRODUCE.md").write_text(text.replace("generated: claims", "generated: other"))
    with pytest.raises(UserError, match="generated section 'other'"):
        docs.generated(tmp_path)


def test_the_first_screen_names_every_claim() -> None:
    from artifact import claim

    top = "\n".join((ROOT / "REPRODUCE.md").read_text().splitlines()[:45])
    assert all(f"`artifact verify {name}`" in top for name in claim.names())


@pytest.mark.parametrize("form", ["ctuning", "eurosys"])
def test_appendix_forms_name_every_claim_and_no_typed_figure(form: str) -> None:
    from artifact import claim
    from paper_tables.render import typed_figures

    text = (ROOT / docs.APPENDIX / f"{form}.tex").read_text()
    assert all(f"verify {name}".replace("_", r"\_") in text for name in claim.names())
    assert typed_figures((ROOT / docs.APPENDIX / f"{form}.tex.j2").read_text()) == []
