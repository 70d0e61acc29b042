"""Campaigns on Ray: a local cluster of several nodes, one of them killed while it measures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_campaign import PROFILE

from artifact import ray_executor
from artifact.cli import main
from artifact.errors import UserError
from artifact.records import Cell, CellError, Run
from artifact.samples import SampleLog

ray = pytest.importorskip("ray", reason="Ray is not installed here: `requirements/setup.sh ray`")

TESTS = Path(__file__).parent
PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, so that every cell runs on a node that can be taken away."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{TESTS.parent}{os.pathsep}{TESTS}"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield started
    started.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def run(cluster: Any, tmp_path: Path) -> Iterator[Run]:
    """A run whose cells go to the cluster."""
    executor = ray_executor.RayExecutor(cluster.address)
    with Run(tmp_path / "r", PROFILE) as opened:
        opened.start_claim("fake", TESTS / "fake_campaign.py")
        opened.many = executor
        yield opened
    executor.close()


def cell(key: str, task: str = "rows", **params: Any) -> Cell:
    return Cell("fake", key, f"fake_tasks:{task}", params, 0, PATIENCE_S)


def plain(path: Path) -> list[Any]:
    """What was measured, in the order of the cells' names, without times and process ids."""
    log = SampleLog(path / "samples.jsonl")
    kept = ("status", "depends", "sources", "task", "params", "rows")
    return sorted(
        [g.cell.key, *(json.dumps(g.closing.get(k)) for k in kept), json.dumps(log.rows(g))] for g in log.groups()
    )


def test_cells_on_two_nodes_give_what_one_machine_gives(run: Run, cluster: Any, tmp_path: Path) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cells = [cell(f"c{i}", n=2, value=i) for i in range(4)]
    rows = run.measure(cells)
    assert [row["cell"] for row in rows] == [f"c{i}" for i in range(4) for _ in range(2)], "in the order asked for"
    pids = {group.closing["worker"]["pid"] for group in run.log.groups()}
    assert len(pids) == 4, "a process of its own for every cell"
    with Run(tmp_path / "local", PROFILE) as alone:
        alone.start_claim("fake", TESTS / "fake_campaign.py")
        alone.measure(cells)
    assert plain(tmp_path / "r") == plain(tmp_path / "local")
    with pytest.raises(CellError, match=r"counted keep ratio 0\.7 is not the requested 0.5"):
        run.measure([cell("bad", "raises")])
    for node in nodes:
        cluster.remove_node(node)


def test_a_node_killed_while_it_measures_costs_nothing_but_time(run: Run, cluster: Any, tmp_path: Path) -> None:
    """Only the lost cell is started again, on the node that is left."""
    started, release, marks = (tmp_path / name for name in ("started", "release", "marks"))
    doomed = cluster.add_node(num_cpus=1)
    spare = []

    class Killer:
        """Takes the node away as soon as the cell on it has yielded its first row."""

        def __call__(self, fraction: float, doing: str) -> None:
            if started.exists() and not spare:
                cluster.remove_node(doomed, allow_graceful=False)
                started.unlink()
                spare.append(cluster.add_node(num_cpus=1))
                release.write_text("")

    class Silent:
        update = Killer()

        def cells(self, *_: Any) -> None: ...
        def begin(self, *_: Any) -> None: ...
        def end(self, *_: Any) -> None: ...
        def close(self) -> None: ...

    run.progress = Silent()
    held = cell("held", "held", started=str(started), release=str(release))
    rows = run.measure([held, cell("other", marks=str(marks), name="other")])
    assert spare and [row["i"] for row in rows if row["cell"] == "held"] == [0, 1]
    assert started.exists(), "the cell ran again from its beginning"
    assert marks.read_text().split() == ["other"]
    assert {group.closing["status"] for group in run.log.groups()} == {"ok"}
    cluster.remove_node(spare[0])


def test_a_node_with_other_sources_refuses_the_cell() -> None:
    one = {"claim": "fake", "key": "c", "task": "fake_tasks:rows", "params": {}, "block": 0, "timeout_s": 9.0}
    with pytest.raises(UserError, match="this node's sources are"):
        ray_executor.measure_on_node(one, {}, __file__, "0" * 64)
    with pytest.raises(UserError, match=r"absent\.py is not on this node"):
        ray_executor.measure_on_node(one, {}, "/nowhere/absent.py", "0" * 64)


def test_stragglers_are_named() -> None:
    waiting = [cell("slow")]
    late = ray_executor.standing(7, 8, [1.0, 1.2, 1.1], waiting, time.monotonic() - 60)
    assert late == "7 of 8 cells, still waiting after 60 s for slow of block 0"
    assert ray_executor.standing(7, 8, [40.0, 50.0], waiting, time.monotonic() - 60) == "7 of 8 cells"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--address", "auto"], "add --executor ray"),
        (["--executor", "ray", "--budget-s", "9"], "leave it out with --executor ray"),
        (["--executor", "ray", "--address", "ray://127.0.0.1:1"], "no Ray cluster answers"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["campaign", "byte_account", "--run", str(tmp_path / "r"), *options]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert words in said
