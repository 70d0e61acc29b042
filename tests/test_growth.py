"""The growth bench: what it asks for, and that nothing held in memory grows with the rows of finished cells."""

from __future__ import annotations

from pathlib import Path

from artifact.bench import growth
from artifact.profiles import Profile
from artifact.records import Run


def test_contexts_and_placements_are_scaled_one_at_a_time(tmp_path: Path) -> None:
    with Run(tmp_path / "r", Profile("embedded", "m.gguf", "cpu", "float32", None, 2)) as run:
        asked = list(growth.cells(run))
    assert len({cell.key for *_, cell in asked}) == len(asked) == 11
    assert {n for _, n, _, _ in asked} == {1792, 3584, 7168}
    assert [p for kind, n, p, _ in asked if kind == "retrieval" and n == 1792] == [4, 8, 16]
    assert growth.Line("timing", 7168, 0, 61.04, 2_500_000_000).markdown() == "| timing | 7.00K | - | 61.0 | 2.50 |"


def test_a_finished_cell_costs_an_index_entry_whatever_its_rows(tmp_path: Path) -> None:
    few, many = (growth.opening(tmp_path / str(done), done)[1] for done in (50, 250))
    size = (tmp_path / "250" / "samples.jsonl").stat().st_size / 250
    assert (many - few) / 200 < 4096 < size
