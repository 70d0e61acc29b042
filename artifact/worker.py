"""One cell in one process: `python -m artifact.worker`, or a fork of one that has the libraries loaded, reads a JSON
request and writes JSON lines.

Request (first line of standard input): {"task": "module:function", "params": {...}, "threads": 2}.
Answers (standard output): {"row": {...}}, {"progress": 0.4, "doing": "..."}, then {"done": rows, ...} or {"error":
"..."}. Standard input stays open for as long as the parent lives; at its end the worker stops, so a killed parent
leaves nobody behind. Thread counts are set before anything heavy is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
PROTOCOL_KEYS = frozenset({"progress", "doing"})


def main(forked: bool = False) -> int:
    """Run the requested task; 0 when it ended, 1 when it raised."""
    from artifact.errors import UserError

    out = _private_output()
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    set_threads(int(request["threads"]))
    from artifact import gpu_state

    idle = gpu_state.sample()
    begin, count = time.perf_counter(), 0
    try:
        for message in resolve(request["task"])(request["params"]):
            if PROTOCOL_KEYS.issuperset(message):
                send(out, message)
            else:
                count += 1
                send(out, {"row": message})
    except UserError as error:
        send(out, {"error": str(error), "usage": True})
        return 1
    except BaseException as error:
        # Whatever ends the task is this cell's reason; it is re-raised so that its traceback reaches the record.
        send(out, {"error": f"{type(error).__name__}: {_first_line(error)}", "usage": False})
        raise
    seconds, worker = time.perf_counter() - begin, describe(forked)
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        worker["gpu_before"], worker["gpu_after"] = idle, gpu_state.sample()
        worker["gpu_peak_bytes"] = sys.modules["torch"].cuda.max_memory_reserved()
    send(out, {"done": count, "seconds": seconds, "peak_bytes": peak_bytes(), "worker": worker})
    return 0


def resolve(task: str) -> Callable[[dict[str, Any]], Iterator[dict[str, Any]]]:
    """The function named by "module:function"."""
    module, _, function = task.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"task {task} is not a function")
    return found


def set_threads(threads: int) -> None:
    """Thread counts of OpenMP, MKL, OpenBLAS and Numba; torch reads the first of them when it is imported."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def describe(forked: bool) -> dict[str, Any]:
    """The process as the record needs it: id, threads asked for and threads that torch really uses, where it was
    imported, whether it was forked, and processor time spent, in the system as well (memory touched for the first time
    is a part of it).
    """
    import resource

    found: dict[str, Any] = {"pid": os.getpid(), "forked": forked, "threads": int(os.environ["OMP_NUM_THREADS"])}
    spent = resource.getrusage(resource.RUSAGE_SELF)
    found |= {"user_s": round(spent.ru_utime, 2), "system_s": round(spent.ru_stime, 2)}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch_threads"] = torch.get_num_threads()
    return found


def send(out: TextIO, message: dict[str, Any]) -> None:
    """One JSON line, flushed."""
    out.write(json.dumps(message) + "\n")
    out.flush()


def _private_output() -> TextIO:
    """The real standard output for messages only; whatever a library prints goes to standard error instead."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _stop_with_parent() -> None:
    while sys.stdin.readline():
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # whatever the task has started ends as well
    os._exit(3)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:500]


if __name__ == "__main__":
    raise SystemExit(main())
