"""Small tasks that behave well, badly and worse, run by real worker processes in the campaign tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from artifact.errors import UserError

Params = dict[str, Any]


def rows(params: Params) -> Iterator[dict[str, Any]]:
    """`n` rows; says how far it is; leaves a mark in `marks` so that a test can count executions."""
    if marks := params.get("marks"):
        with Path(marks).open("a", encoding="utf-8") as file:
            file.write(f"{params.get('name', '')}\n")
    for i in range(params.get("n", 3)):
        yield {"progress": i / params.get("n", 3), "doing": f"row {i}"}
        yield {"i": i, "value": params.get("value", 1.5) * i}


def origins(params: Params) -> Iterator[dict[str, Any]]:
    """Who started this process, and whether it came with the libraries loaded."""
    yield {"parent": os.getppid(), "loaded": int("torch" in sys.modules), "columns": os.environ.get("COLUMNS", "")}


def loads(params: Params) -> Iterator[dict[str, Any]]:
    """Whether this process came with the weights of `model`, and how many kernels and threads work in it."""
    import torch

    from artifact.engine import models
    from kernels import gemv

    held = len(models._held)
    weights = models.load(params["model"])
    matrix = weights.layers[0].o
    x, y = torch.ones(matrix.w.shape[1]), torch.zeros(matrix.w.shape[0])
    gemv.bind(x, matrix.w, y)()
    right = torch.allclose(y, (matrix.w_in.T.double() @ x.double()).float(), atol=1e-5)
    yield {"parent": os.getppid(), "held": held, "right": int(right), "identity": weights.identity}


def held(params: Params) -> Iterator[dict[str, Any]]:
    """Yields a row, says that it is under way by creating `started`, then waits until `release` exists."""
    yield {"i": 0, "value": 0.0}
    Path(params["started"]).write_text(str(os.getpid()), encoding="utf-8")
    while not Path(params["release"]).exists():
        time.sleep(0.02)
    yield {"i": 1, "value": 1.0}


def hang(params: Params) -> Iterator[dict[str, Any]]:
    """Never ends, and has a child that never ends either; the child's process id is written to `child`."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if "child" in params:
        Path(params["child"]).write_text(str(child.pid), encoding="utf-8")
    yield {"i": 0}
    time.sleep(600)


def leave(params: Params) -> Iterator[dict[str, Any]]:
    """Exits with a status in the middle of its rows, as a crashing extension does."""
    yield {"i": 0}
    print("last words on standard error", file=sys.stderr, flush=True)
    os._exit(params["status"])


def killed(params: Params) -> Iterator[dict[str, Any]]:
    """Dies of the signal that the kernel sends when memory runs out."""
    yield {"i": 0}
    os.kill(os.getpid(), signal.SIGKILL)


def raises(params: Params) -> Iterator[dict[str, Any]]:
    """Raises in the middle."""
    yield {"i": 0}
    raise ArithmeticError("counted keep ratio 0.7 is not the requested 0.5")


def out_of_memory(params: Params) -> Iterator[dict[str, Any]]:
    """What numpy does when an allocation fails."""
    yield {"i": 0}
    raise MemoryError("Unable to allocate 9.00 TiB")


def refuses(params: Params) -> Iterator[dict[str, Any]]:
    """The user's input is wrong."""
    raise UserError("model x.gguf has 3 bytes; run `make setup`")
    yield {}


def prints(params: Params) -> Iterator[dict[str, Any]]:
    """A library that writes to standard output, in Python and past it."""
    print('{"row": {"i": 99}}', flush=True)
    os.write(1, b'{"done": 7}\n')
    yield {"i": 0}


def nothing(params: Params) -> Iterator[dict[str, Any]]:
    """Ends well without a single row."""
    yield from ()


def reserved(params: Params) -> Iterator[dict[str, Any]]:
    """Claims to be a recorded sample."""
    yield {"i": 0, "origin": "recorded"}


def environment(params: Params) -> Iterator[dict[str, Any]]:
    """The thread counts that a worker sees, and what was imported before the task was."""
    import torch

    names = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    yield {name: os.environ.get(name) for name in names} | {"torch": torch.get_num_threads()}


def path(params: Params) -> Iterator[dict[str, Any]]:
    """A row that holds a path of this machine."""
    yield {"file": f"{params['root']}/kernels/gemv.py", "home": str(Path.home())}
