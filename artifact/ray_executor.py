"""Cells of a campaign on a Ray cluster: every cell in a fresh process of its own, with one GPU or its share of a node.

Ray decides where a cell runs and starts it again when a node or its worker is lost; nothing else is ever retried, so an
error is still that cell's result. On its node a cell is measured by `campaign.measure_here`, as on one machine, and
what comes back has the same form. Nodes need this checkout at the same path and the model at the path of the profile:
a node whose sources differ from those of the driver refuses the cell.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from artifact import campaign, depends
from artifact.errors import UserError
from artifact.profiles import Profile
from artifact.records import Cell, CellResult, Run

LOST_RETRIES = 3  # of a cell whose worker or node has gone
REPORT_S = 2.0
STRAGGLES = 2.0  # times the median of finished cells
INSTALL = "`requirements/setup.sh ray` in a checkout, or pip install '.[ray]'"


@dataclass
class RayExecutor:
    """Measures many cells at once on the cluster at `address`; None starts one on this machine."""

    address: str | None = None

    def __post_init__(self) -> None:
        self.ray = _connect(self.address)

    def __call__(self, cells: list[Cell], profile: Profile, run: Run) -> Iterator[tuple[Cell, CellResult]]:
        """Yield every cell with what it came to, as they end."""
        needs: dict[str, Any] = {"num_cpus": profile.threads}
        if profile.device == "cuda":
            needs = {"num_cpus": 1, "num_gpus": 1}
        # max_calls: Ray's worker ends with its cell. max_retries is for lost workers; what a cell raises is its result.
        remote = self.ray.remote(max_calls=1, max_retries=LOST_RETRIES, **needs)(measure_on_node)
        waiting = {}
        for cell in cells:
            code = _code_hash(run.source(cell.claim))
            waiting[remote.remote(asdict(cell), asdict(profile), str(run.source(cell.claim)), code)] = cell
            if run.progress is not None:
                run.progress.begin(cell)
        yield from self._collect(waiting, run)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self.ray.shutdown()

    def _collect(self, waiting: dict[Any, Cell], run: Run) -> Iterator[tuple[Cell, CellResult]]:
        begin, total, seconds = time.monotonic(), len(waiting), []
        while waiting:
            ready, _ = self.ray.wait(list(waiting), timeout=REPORT_S)
            for reference in ready:
                cell = waiting.pop(reference)
                result = self._result(reference, begin)
                seconds.append(result.seconds)
                yield cell, result
            if run.progress is not None and waiting:
                done = total - len(waiting)
                run.progress.update(done / total, standing(done, total, seconds, list(waiting.values()), begin))

    def _result(self, reference: Any, begin: float) -> CellResult:
        """What came back, or the loss of every worker that tried."""
        try:
            return CellResult(**self.ray.get(reference))
        except self.ray.exceptions.RayTaskError as error:
            reason = str(error.cause).splitlines()[0] if str(error.cause) else type(error.cause).__name__
            return CellResult("error", [], time.monotonic() - begin, 0, reason, isinstance(error.cause, UserError))
        except self.ray.exceptions.RayError as error:
            reason = f"its worker was lost {LOST_RETRIES + 1} times ({type(error).__name__})"
            return CellResult("error", [], time.monotonic() - begin, 0, reason)


def measure_on_node(cell: dict[str, Any], profile: dict[str, Any], source: str, code: str) -> dict[str, Any]:
    """One cell on whatever node Ray chose. UserError where the node holds other sources than the driver."""
    if (found := _code_hash(Path(source))) != code:
        raise UserError(
            f"this node's sources are {found[:12]}, the driver's {code[:12]}; use one checkout on all nodes"
        )
    return asdict(campaign.measure_here(Cell(**cell), Profile(**profile)))


def standing(done: int, total: int, seconds: list[float], waiting: list[Cell], begin: float) -> str:
    """How far a campaign is, and which cells take far longer than those that have ended."""
    text = f"{done} of {total} cells"
    so_far = time.monotonic() - begin
    if len(seconds) >= 2 and so_far > STRAGGLES * statistics.median(seconds) and len(waiting) <= max(1, total // 4):
        names = ", ".join(f"{cell.key} of block {cell.block}" for cell in waiting[:3])
        text += f", still waiting after {so_far:.0f} s for {names}"
    return text


def _code_hash(source: Path) -> str:
    """Everything a cell depends on but its model and text, which are too large to hash for every cell."""
    if not source.is_file():
        raise UserError(f"{source.name} is not on this node; use one checkout at the same path on all nodes")
    return depends.sources_hash(source)


def _connect(address: str | None) -> ModuleType:
    try:
        import ray
    except ImportError:
        raise UserError(f"--executor ray needs Ray, which is not installed; add it with {INSTALL}") from None
    try:
        # Nodes import this package from the driver's checkout, whatever directory they were started in.
        env = {"env_vars": {"PYTHONPATH": campaign.worker_path()}}
        ray.init(address=address, log_to_driver=False, runtime_env=env, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no Ray cluster answers at {address or 'this machine'} ({first}); start one with `ray start`"
        ) from None
    return ray  # type: ignore[no-any-return, unused-ignore]
