"""The byte-account claim: every printed figure rebuilt, seeded faults contradicted, the table it fills."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from artifact import account
from artifact.claim import Verdict
from artifact.profiles import NAMES, Profile
from artifact.shapes import Shape
from claims import byte_account
from claims._byte_checks import table1_row
from paper_tables import figures
from paper_tables.contexts import table1
from paper_tables.render import TableMissing, render, typed_figures

ROOT = Path(__file__).resolve().parent.parent
PROFILE = Profile("embedded", "smollm2-135m", "cpu", "float32", None, 2)


def rows() -> list[dict[str, Any]]:
    """What `measure` stores, after the trip through JSON."""
    return [json.loads(json.dumps(byte_account.figure_row(check))) for check in byte_account.CHECKS]


def verdicts(stored: list[dict[str, Any]], profile: Profile = PROFILE) -> dict[str, Verdict]:
    return {finding.predicate.name: finding.verdict for finding in byte_account.judge(stored, profile)}


def contradicted() -> set[str]:
    return {name for name, verdict in verdicts(rows()).items() if verdict is Verdict.CONTRADICTED}


def test_every_printed_figure_is_reproduced_in_every_profile_in_under_a_second() -> None:
    start = time.process_time()
    stored = rows()
    for name in NAMES:
        profile = Profile(name, "smollm2-135m", "cpu", "float32", None, 2)
        assert set(verdicts(stored, profile).values()) == {Verdict.REPRODUCED}
    assert time.process_time() - start < 1
    assert len(stored) == len(byte_account.CLAIM.predicates) >= 40


@pytest.mark.parametrize(
    ("figure_id", "low", "high"),
    [
        ("table1.llama-3.1-8b.all", 74.25, 74.35),
        ("table1.qwen3-8b.ffn", 51.35, 51.45),
        ("table1.mistral-7b-v0.3.window", 31.5, 32.5),
        ("bound.kv.128k", 1.595, 1.605),
        ("batch.n_star.4", 2.95, 3.05),
        ("slope.a100", 0.055, 0.065),
        ("shift.a100", 16.5, 17.5),
        ("shift.a6000", 7.5, 8.5),
        ("matched.1.0", 57.75, 57.85),
    ],
)
def test_the_region_of_a_rebuilt_figure_is_its_last_digit(figure_id: str, low: float, high: float) -> None:
    region = {p.name: p.region for p in byte_account.CLAIM.predicates}[figure_id]
    assert (region.low, region.high) == pytest.approx((low, high), rel=1e-12)


def test_cache_bytes_charged_by_query_heads_are_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "kv_values_per_token", property(lambda s: 2 * s.heads * s.head_dim))
    assert {"table1.llama-3.1-8b.all", "table1.llama-3.2-3b.all", "bound.kv.128k", "batch.n_star.4"} <= contradicted()


def test_a_forgotten_output_head_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "head_bytes", lambda shape, setting: 0.0)
    assert "bound.kv.128k" in contradicted()


def test_a_forgotten_gate_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "ffn_params", property(lambda s: 2 * s.hidden * s.intermediate))
    assert "table1.llama-3.1-8b.ffn" in contradicted()


def test_a_keep_ratio_that_is_ignored_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "kv_saving", lambda shape, setting, n: 0.0)
    found = contradicted()
    assert {"bound.kv.128k", "gain.kv.128k.a100", "gain.both.64k.a6000"} <= found


def test_precision_that_is_ignored_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    saving = account.projection_saving
    monkeypatch.setattr(account, "projection_saving", lambda s, x: saving(s, x) * 16 / x.weight_bits)
    assert "quant4.closer" in contradicted()


def test_decimal_k_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("claims._byte_checks.K_TOKENS", 1000)
    assert {"table1.llama-3.1-8b.all", "table1.qwen3-8b.window"} <= contradicted()


def test_a_missing_or_broken_row_is_never_reproduced() -> None:
    stored = rows()
    del stored[0]
    stored[0]["point"] = stored[0]["low"] = stored[0]["high"] = float("nan")
    first, second = (p.name for p in byte_account.CLAIM.predicates[:2])
    result = verdicts(stored)
    assert (result[first], result[second]) == (Verdict.NOT_RUN, Verdict.INCONCLUSIVE)
    assert set(verdicts([]).values()) == {Verdict.NOT_RUN}


def test_printed_figures_are_numbers_with_a_place() -> None:
    for figure in figures.figures("crossover").values():
        assert figure.low < figure.value < figure.high and figure.place and figure.what and figure.unit
    assert figures.figures("crossover")["gain.both.64k.a6000"].low == 1.995


def test_alone_from_another_directory(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "claims" / "byte_account.py"), "--profile", "embedded", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["claims"] == {"byte_account": "reproduced"}
    assert (tmp_path / "run" / "tables" / "table1.tex").exists()


def table_rows(origin: str = "live") -> list[dict[str, Any]]:
    return [table1_row(model) | {"origin": origin} for model in ("Llama-3.2-3B", "SmolLM2-135M")]


def test_table_marks_live_recorded_and_printed_cells() -> None:
    paper = {"crossover": figures.transcript("crossover")}
    live, recorded = (render("table1", table_rows(origin), {}, paper) for origin in ("live", "recorded"))
    assert r"Llama-3.2-3B & \fromlive{34.3K} & \frompaper{34.3K} & \fromlive{25.7K} & \frompaper{25.7K}" in live
    assert r"\fromlive{6.4K} & --" in live
    assert r"\fromrecorded{34.3K}" in recorded and r"\fromlive{3" not in recorded
    assert live == render("table1", table_rows(), {}, paper)


def test_table_without_rows_says_so() -> None:
    with pytest.raises(TableMissing):
        table1.context([{"kind": "figure"}], {}, {"crossover": figures.transcript("crossover")})


def test_template_types_no_figure() -> None:
    assert typed_figures((ROOT / "paper_tables" / "templates" / "table1.tex.j2").read_text(encoding="utf-8")) == []
