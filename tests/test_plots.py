"""Figures: from stored rows only, the same bytes each time, a reason where their rows are absent, right numbers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from artifact.account import Mode, Setting, bound
from artifact.shapes import known_shape
from paper_tables.plots import series, style
from paper_tables.plots.render import figures_of, load, plot, plot_names, plot_run
from paper_tables.render import TableMissing
from tests import run_folder
from tests.faults import baseline_sensitivity, crossover, speedup_bounds

ALL = ("byte_account", *run_folder.ROWS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder.make(tmp_path_factory.mktemp("runs") / "r", ALL)


def test_all_five_figures_are_drawn_twice_with_the_same_bytes(run: Path) -> None:
    plots, skipped = plot_run(run)
    assert [one.name for one in plots] == ["figure1", "figure3", "figure4", "figure5", "figure6"] and not skipped
    first = {path: path.read_bytes() for one in plots for path in one.files}
    assert {path.suffix for path in first} == {".pdf", ".png"}
    shutil.rmtree(run / "figures")
    again, _ = plot_run(run)
    assert {path: path.read_bytes() for one in again for path in one.files} == first
    assert all(b"CreationDate" not in content for path, content in first.items() if path.suffix == ".pdf")


def test_a_users_own_settings_change_no_byte(run: Path) -> None:
    import matplotlib

    module = load("figure5")
    rows = [row | {"claim": "baseline_sensitivity", "origin": "live"} for row in baseline_sensitivity.honest()]
    plain, _ = plot(module, rows, {})
    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 20, "axes.grid": False}):
        changed, _ = plot(module, rows, {})
    assert changed == plain


@pytest.mark.parametrize("name", plot_names())
def test_a_figure_without_its_rows_says_so(name: str, tmp_path: Path) -> None:
    folder = run_folder.make(tmp_path / "r", ())
    plots, skipped = plot_run(folder, [name])
    assert plots == [] and skipped[name].startswith("no samples of ")
    assert not (folder / "figures").exists()


def test_importing_figures_does_not_import_matplotlib() -> None:
    code = "import sys, paper_tables.plots.render as r; [r.load(n) for n in r.plot_names()];"
    code += "print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_gains_and_bounds_equal_the_closed_form() -> None:
    rows = series.timed(speedup_bounds.honest())
    gains = series.gains(rows, (0.5, 0.3))
    times = crossover.machine(dense_cost=0.0)
    for mode, ratios in (("projection", (0.5, 1.0)), ("kv", (1.0, 0.3)), ("both", (0.5, 0.3))):
        for context, interval in gains[mode].items():
            expected = times(1.0, 1.0, context) / times(*ratios, context)
            assert interval.point == pytest.approx(expected, rel=5e-3)
    shape, setting = known_shape("SmolLM2-135M"), Setting(0.5, 0.3, weight_bits=32, kv_bits=32)
    (limit,) = series.bounds(rows, "both", (0.5, 0.3), [2048.0])
    assert limit == pytest.approx(bound(shape, setting, 2048, Mode.BOTH))


def test_arms_of_unequal_length_are_an_error() -> None:
    rows = series.timed(speedup_bounds.honest())
    next(row for row in rows if row["mode"] == "kv")["ms"].pop()
    with pytest.raises(ValueError, match="samples"):
        series.gains(rows, (0.5, 0.3))


def test_perplexity_is_the_exponential_of_the_mean_loss_and_needs_the_same_windows() -> None:
    rows = run_folder.quality_rows()
    found = series.perplexities(rows)
    dense = [value for row in rows if row.get("label") == "dense" for value in row["nll"]]
    assert found[1.0, 1.0, "full"].point == pytest.approx(float(np.exp(np.mean(dense))))
    with pytest.raises(ValueError, match="different windows"):
        series.perplexities(rows[:-1])


def test_figure_3_prefers_its_own_claim_and_falls_back_to_the_sweep() -> None:
    own = [row | {"claim": "speedup_bounds", "origin": "live"} for row in speedup_bounds.honest()]
    sweep = [row | {"claim": "crossover"} for row in run_folder.crossover_rows()]
    _, alt = plot(load("figure3"), own + sweep, {})
    assert "at 4K" in alt and "at most" in alt
    _, alt = plot(load("figure3"), sweep, {})
    assert "at 4K" not in alt and "at 7.75K" in alt
    around = [row for row in sweep if row["cell"].startswith("crossing")]
    with pytest.raises(TableMissing, match="no timed rows"):
        plot(load("figure3"), around, {})


def test_an_unbounded_interval_has_no_bar() -> None:
    rows = baseline_sensitivity.honest(blocks=1)
    _, alt = plot(load("figure5"), [row | {"origin": "live"} for row in rows], {})
    assert "over masked" in alt


def test_series_differ_without_colour() -> None:
    for looks in (style.LOOKS, style.PATH_LOOKS):
        assert len({look.marker for look in looks.values()}) == len(looks)
    bounded = [style.LOOKS[mode] for mode in ("projection", "kv", "both")]
    assert len({look.dashes for look in bounded}) == 3


def test_every_figure_belongs_to_a_claim() -> None:
    assert figures_of("crossover") == ["figure1", "figure3", "figure4"]
    assert all(load(name).CLAIMS + load(name).OPTIONAL for name in plot_names())
