"""Tables: from records only, every figure with its origin, special characters harmless, the same bytes each time."""

from __future__ import annotations

import re
import shutil
import string
import subprocess
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact.cli import main
from artifact.errors import UserError
from paper_tables import render
from paper_tables.render import Figure, Latex, environment, escape, printable, table_names, typed_figures


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "r"
    assert main(["verify", "byte_account", "--run", str(folder), "--profile", "embedded", "--json"]) == 0
    return folder


def test_rendering_twice_gives_the_same_bytes(run: Path) -> None:
    first = {path.name: path.read_bytes() for path in (run / "tables").iterdir()}
    assert "table1.tex" in first
    shutil.rmtree(run / "tables")
    (run / "results.json").unlink()
    for _ in range(2):
        assert main(["tables", str(run)]) == 0
        assert {path.name: path.read_bytes() for path in (run / "tables").iterdir()} == first


def test_every_printed_figure_names_its_origin(run: Path) -> None:
    """A digit in the body of a table lies inside one of the three origin macros."""
    body = (run / "tables" / "table1.tex").read_text().split(r"\midrule")[1].split(r"\bottomrule")[0]
    names = re.findall(r"^[^&]*", body, re.MULTILINE)  # the first column holds names such as Llama-3.1-8B
    for name in names:
        body = body.replace(name, "", 1)
    assert r"\fromlive{" in body and r"\frompaper{" in body
    assert not re.search(r"\d", re.sub(r"\\from(live|recorded|paper)\{[^{}]*\}", "", body))


@pytest.mark.parametrize("value", [1.5, 3, True, None, [1], {"a": 1}])
def test_a_number_without_an_origin_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="say where the number comes from"):
        environment().from_string("((( x )))").render(x=value)


def test_an_undefined_name_is_an_error_and_not_an_empty_cell() -> None:
    for source in ("((( missing )))", "((( row.missing )))", "((* if missing *))x((* endif *))"):
        with pytest.raises(jinja2.UndefinedError, match="missing"):
            environment().from_string(source).render(row={})


@pytest.mark.parametrize("origin", ["", "measured", "live}\\input{x"])
def test_an_unknown_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="not one of live, recorded, paper"):
        Figure("1.5x", origin)


def test_each_origin_has_its_own_mark() -> None:
    marks = [printable(Figure("1.5x", origin)) for origin in ("live", "recorded", "paper")]
    assert marks == [r"\fromlive{1.5x}", r"\fromrecorded{1.5x}", r"\frompaper{1.5x}"]
    assert printable(Latex(r"\textbf{a}")) == r"\textbf{a}"


@given(st.text(alphabet=string.printable + "{}\\$&#_%^~<>é\u2028\x00"))
def test_no_text_can_reach_latex_as_a_command(text: str) -> None:
    """Undoing our own replacements leaves no special character behind, and braces balance."""
    escaped = escape(text)
    rest = escaped
    for command in sorted(set(render.SPECIAL.values()), key=len, reverse=True):
        rest = rest.replace(command, "")
    assert not set(rest) & set(render.SPECIAL) and not any(ord(c) < 32 for c in escaped)
    figure = re.sub(r"\\[{}]", "", printable(Figure(text, "live")))
    assert figure.count("{") == figure.count("}")


def test_hostile_text_is_printed_and_not_run() -> None:
    text = r"\input{/etc/passwd} ((( x ))) ((* for *)) <script>alert(1)</script> 100% & #1"
    printed = environment().from_string("((( x )))").render(x=text)
    assert r"\input" not in printed and r"\textbackslash{}input\{" in printed and "<script>" not in printed
    assert "((( x )))" in printed  # a template inside a value stays text


@pytest.mark.parametrize("name", table_names())
def test_no_figure_is_typed_by_hand_into_a_template(name: str) -> None:
    source = (render.FOLDER / "templates" / f"{name}.tex.j2").read_text(encoding="utf-8")
    assert typed_figures(source) == []


@pytest.mark.parametrize(
    "typed",
    [
        "Llama & 74.3K \\\\",
        "((( row.value if row.value else '1.29x' )))",
        "((* set n = 128 *))",
        "((( 1.5 )))",
        "\\fromlive{74.3}",
        "within 4.1K tokens",
        "a share of .55",
    ],
)
def test_a_typed_figure_is_found(typed: str) -> None:
    assert typed_figures(typed)


def test_layout_may_count() -> None:
    layout = (
        r"\begin{tabular}{lp{3.5cm}r} \cmidrule(lr){2-4} \multicolumn{3}{c}{x} \\[2pt] \hspace{1em} \label{tab:table1}"
        r"\renewcommand{\arraystretch}{1.2} \newcommand{\x}[1]{#1}"
    )
    assert typed_figures(layout.replace("[1]", "")) == []


def test_templates_read_no_file_outside_their_folder() -> None:
    for name in ("../figures.py", "/etc/passwd", "table1.tex.j2/../../render.py"):
        with pytest.raises(jinja2.TemplateNotFound):
            environment().get_template(name)
    with pytest.raises(UserError, match="no table is called"):
        render.render_run(Path("nowhere"), ["../x"])


def test_a_table_whose_claims_did_not_run_is_left_out_with_the_reason(run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "r"
    shutil.copytree(run, empty)
    (empty / "samples.jsonl").write_bytes(b"")
    written, skipped = render.render_run(empty, ["table1"])
    assert written == [] and "no samples of byte_account" in skipped["table1"]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_a_rendered_table_compiles(run: Path, tmp_path: Path) -> None:
    table = (run / "tables" / "table1.tex").read_text()
    document = "\\documentclass{article}\\usepackage{booktabs}\\usepackage[T1]{fontenc}\\begin{document}\n" + table
    (tmp_path / "t.tex").write_text(document + "\\end{document}\n")
    subprocess.run(["pdflatex", "-halt-on-error", "-no-shell-escape", "t.tex"], cwd=tmp_path, check=True, timeout=120)
