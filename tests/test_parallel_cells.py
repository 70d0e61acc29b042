"""A model split over two ranks of this machine, timed by the task that the 70B claim uses; and that claim's faults."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from artifact.account import Mode, Setting, step_bytes
from artifact.claim import NotRun
from artifact.measure.parallel_cells import Row, timed
from artifact.profiles import Profile
from artifact.records import Run
from artifact.shapes import Shape
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import sharded_70b as claim
from tests.faults.sharded_70b import FAULTS, PROFILE, SHAPE, UNEQUAL, honest

SMALL = Shape("small", 128, 2, 4, 2, 32, 256, 64, 1024, False)
CONTEXT = 512


def request(**changed: object) -> Row:
    shape = dataclasses.asdict(SMALL)
    params = {"shape": shape, "device": "cpu", "dtype": "float32", "size": 2, "context": CONTEXT, "steps": 6}
    return params | {"r_p": 0.5, "r_kv": 0.3, "order_seed": 0} | changed


@pytest.mark.parametrize("seed", [0, 1])
def test_two_ranks_read_what_the_account_says(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    rows = [row for row in timed(request(order_seed=seed)) if row.get("kind") == "rank"]
    assert sorted((row["mode"], row["rank"]) for row in rows) == [
        (mode, rank) for mode in ("dense", "kv", "projection") for rank in (0, 1)
    ]
    assert all(len(row["ms"]) == 6 and row["shape"]["name"] == "small" for row in rows)
    for mode in (Mode.DENSE, Mode.KV, Mode.PROJECTION):
        read = sum(
            row["projection_bytes"] + row["kv_bytes"] + row["head_bytes"] for row in rows if row["mode"] == mode.value
        )
        setting = Setting(0.5 if mode is Mode.PROJECTION else 1.0, 0.3 if mode is Mode.KV else 1.0, 32, 32)
        assert read == pytest.approx(step_bytes(SMALL, setting, CONTEXT, mode), rel=0.05)


def test_a_rank_that_fails_is_the_cells_error_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"rank [01] ended with status 1: .*heads 5 does not divide over 2 ranks"):
        list(timed(request(shape=dataclasses.asdict(SMALL) | {"heads": 5, "kv_heads": 5})))


def test_honest_rows_stay_below_the_crossover() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert summarise(findings) is Verdict.REPRODUCED
    extra = findings[0].extra
    assert extra["n* of the bytes, K tokens"] == pytest.approx(291.4, abs=0.1)
    assert float(extra["ratio of the bytes"]) < 1 and extra["measured at, K tokens"] == pytest.approx(127.875)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None]) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    if fault is UNEQUAL:
        with pytest.raises(ValueError, match="block 3 lacks ranks of kv"):
            claim.judge(rows, PROFILE)
    else:
        assert summarise(claim.judge(rows, PROFILE)) is not Verdict.REPRODUCED


def test_without_two_gpus_it_names_the_command_and_counts_for_nothing(tmp_path: Path) -> None:
    with Run(tmp_path / "r", Profile("embedded", "none", "cpu", "float32", None, 1)) as run:
        with pytest.raises(NotRun, match="artifact verify sharded_70b --profile gpu") as caught:
            claim.measure(run)
    assert caught.value.yours


def test_one_layout_fits_two_gpus_of_141_gb_and_two_do_not() -> None:
    needed = claim.rank_bytes(SHAPE, SHAPE.window, 2)
    assert 90e9 < needed < 120e9
    assert needed + SHAPE.layers * SHAPE.projection_params > 141e9
