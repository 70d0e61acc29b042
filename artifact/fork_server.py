"""Workers forked from one process that has loaded the libraries and the model.

A fresh interpreter spends 2 to 9 seconds on imports and another on the weights before a cell begins, more than many
cells measure. A forked worker has both already; whatever else it loads, computes and allocates is its own. Blocks that
are forked share one placement of code, libraries and weights in memory; a cell whose blocks must not asks for a fresh
process (`Cell.fresh`).

The server, `python -m artifact.fork_server FD MODEL DTYPE`, takes requests on a socket: the worker's standard input,
output and error as descriptors, answered by {"pid": n}; when a worker has ended it says {"ended": n, "status": code}.
It starts no thread before it forks, and ends with the socket. Linux only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from typing import IO

from artifact import worker

MESSAGE_BYTES = 4096
HELD_BYTES = 2 << 30  # of weights, in both layouts
START_S = 120.0  # of loading the libraries and forking; a worker is started instead
# Packages whose modules cells import, and what of transformers a tokenizer needs.
PACKAGES = ("artifact.measure", "artifact.engine", "artifact.kv", "artifact.projection", "kernels", "kernels.cpu")
MODULES = (
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "transformers.tokenization_utils_tokenizers",
)


class Unavailable(Exception):
    """No worker can be forked here; one is to be started."""


class Forked:
    """A forked worker as `subprocess.Popen` would show it."""

    def __init__(self, server: ForkServer, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._server = server

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, minus the signal that ended it. subprocess.TimeoutExpired when it goes on for longer."""
        return self._server.status_of(self.pid, timeout)


class ForkServer:
    """The server's process and what it said of workers that ended."""

    def __init__(self, environment: Mapping[str, str], folder: str, held: tuple[str, str]) -> None:
        """held: the model's source and the name of its dtype."""
        self.environment, self.held = dict(environment), held
        self._statuses: dict[int, int] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "artifact.fork_server", str(theirs.fileno()), *held],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd=folder,
                env=self.environment,
                start_new_session=True,
            )

    def serves(self, environment: Mapping[str, str], held: tuple[str, str]) -> bool:
        """Whether it lives and was started for this model in this environment, which libraries read when imported."""
        return self._process.poll() is None and self.environment == dict(environment) and self.held == held

    def worker(self, stderr: IO[bytes]) -> Forked:
        """Fork one. Raises Unavailable when the server could not be started or has ended."""
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        stdin, stdout = os.fdopen(write_in, "w", encoding="utf-8"), os.fdopen(read_out, encoding="utf-8")
        try:
            socket.send_fds(self._socket, [b"fork"], [read_in, write_out, stderr.fileno()])
            while "pid" not in (message := self._message(START_S)):
                self._note(message)
        except OSError as error:
            self._process.kill()  # an answer that comes late would be taken for the next worker's
            stdin.close()
            stdout.close()
            raise Unavailable(str(error)) from error
        finally:
            os.close(read_in)
            os.close(write_out)
        return Forked(self, message["pid"], stdin, stdout)

    def status_of(self, pid: int, timeout: float | None) -> int:
        """Wait until the server says that a worker has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        while pid not in self._statuses:
            try:
                self._note(self._message(None if end is None else max(0.001, end - time.monotonic())))
            except TimeoutError:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0) from None
            except OSError:
                return 1  # the server was killed: nobody knows how its worker ended
        return self._statuses[pid]

    def close(self) -> None:
        """End the server; workers that still run are not touched."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._process.kill()
        self._process.wait()

    def _message(self, timeout: float | None) -> dict[str, int]:
        self._socket.settimeout(timeout)
        data = self._socket.recv(MESSAGE_BYTES)
        if not data:
            raise ConnectionResetError("the fork server has ended")
        found: dict[str, int] = json.loads(data)
        return found

    def _note(self, message: dict[str, int]) -> None:
        if "ended" in message:
            self._statuses[message["ended"]] = message["status"]


def main() -> int:
    """Serve until the socket closes."""
    import selectors

    connection = socket.socket(fileno=int(sys.argv[1]))
    os.close(os.pidfd_open(os.getpid()))  # old kernels and some containers refuse it: better now than behind a fork
    preload()
    hold(*sys.argv[2:4])
    workers: dict[int, int] = {}  # process id by its descriptor, which becomes readable when the process ends
    with selectors.DefaultSelector() as waiting:
        waiting.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fd in workers:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    pid = workers.pop(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    connection.send(json.dumps({"ended": pid, "status": status}).encode())
                    continue
                data, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
                if not data:
                    return 0
                pid = os.fork()
                if pid == 0:
                    become_worker(streams, [connection.detach(), *workers])
                with contextlib.suppress(OSError):  # it has done so itself, or has ended
                    os.setpgid(pid, pid)
                for stream in streams:
                    os.close(stream)
                watched = os.pidfd_open(pid)
                workers[watched] = pid
                waiting.register(watched, selectors.EVENT_READ)
                connection.send(json.dumps({"pid": pid}).encode())


def preload() -> None:
    """Import what cells import, and no more: a fork would lose a thread that something started here. (OpenBLAS, which
    starts its own when it is imported, makes them anew in every fork.)
    """
    import gc

    names = [
        f"{package}.{module.name}"
        for package in PACKAGES
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
        if not module.ispkg
    ]
    for name in [*names, *MODULES]:
        with contextlib.suppress(ImportError):  # a worker that needs it will say so
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from numba.core.registry import cpu_target

        cpu_target.typing_context.refresh()  # half a second at the first kernel otherwise
        cpu_target.target_context.refresh()
    gc.collect()
    gc.freeze()  # collections in a worker would otherwise copy every page that holds an object


def hold(model: str, dtype: str) -> None:
    """Load a model that is not too large to keep, by one thread: a fork would lose the others.

    Raises SystemExit when a library has started threads all the same (one that converts a GGUF read for the first time
    may); the next server finds it converted.
    """
    import torch

    from artifact.engine import models
    from artifact.errors import UserError

    threads, before = torch.get_num_threads(), len(os.listdir("/proc/self/task"))
    torch.set_num_threads(1)
    with contextlib.suppress(UserError):  # the worker that needs it will say so
        models.hold(model, getattr(torch, dtype), HELD_BYTES)
    torch.set_num_threads(threads)
    if len(os.listdir("/proc/self/task")) > before:
        raise SystemExit(f"loading {model} has started threads")


def become_worker(streams: list[int], others: list[int]) -> None:
    """Give this forked process the three streams, and end it with what the worker returns."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for stream, number in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, number)
    for descriptor in [*streams, *others]:
        os.close(descriptor)
    status = 1
    try:
        sys.stdin = open(0, encoding="utf-8", closefd=False)
        status = worker.main(forked=True)
    except BaseException:  # noqa: BLE001 - the last words of a worker, whatever ended it
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    raise SystemExit(main())
