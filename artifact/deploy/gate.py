"""The latency gate: a lookup table of measured costs that says which mode decodes a request fastest (crossover,
sections 3.3 and 5.4).

`artifact gate` measures and writes the table; a server loads it once and asks per request:

    gate = Gate.load("gate.json", model=model_identity("path/to/model"), device=current_device("cpu"))
    gate.choose(prompt_tokens=4096, new_tokens=256).mode

Only admissible modes are chosen, and dense decoding always is one. Imports no torch; an answer takes microseconds.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from artifact.account import Mode
from artifact.checks import count
from artifact.deploy.gate_costs import Costs, costs_from
from artifact.errors import UserError
from artifact.records import read_json, write_json

SCHEMA = 1
MODES = (Mode.DENSE, Mode.PROJECTION, Mode.KV, Mode.BOTH)
WHOLE_CACHE = (Mode.DENSE, Mode.PROJECTION)


@dataclass(frozen=True)
class Choice:
    """A mode with the decode cost of the request in it and in dense decoding, ms, one-time cost included."""

    mode: Mode
    ms: float
    dense_ms: float


@dataclass(frozen=True)
class Check:
    """One admissibility check of a mode: passed is None where it was skipped, and `detail` says what was found or why.

    name: perplexity, passkey or multikey.
    """

    mode: Mode
    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Table:
    """What was measured, for which model, device and version.

    contexts in tokens, increasing; step_ms per mode and context; selection_ms per context; checks of admissibility.
    """

    version: str
    model: str
    model_name: str
    device: str
    dtype: str
    r_p: float
    r_kv: float
    window_tokens: int
    contexts: tuple[int, ...]
    step_ms: Mapping[Mode, tuple[float, ...]]
    selection_ms: tuple[float, ...]
    checks: tuple[Check, ...]
    steps: int
    text: str

    def admissible(self) -> tuple[Mode, ...]:
        """Modes that failed no check; dense decoding is what the checks compare with."""
        failed = {check.mode for check in self.checks if check.passed is False}
        return tuple(mode for mode in MODES if mode not in failed)

    def costs(self) -> Costs:
        """The costs as functions of lengths."""
        once = list(zip(self.contexts, self.selection_ms, strict=True))
        return costs_from(self.contexts, self.step_ms, once, self.r_kv)

    def record(self) -> dict[str, Any]:
        """The table as JSON."""
        return {
            "schema": SCHEMA,
            "kind": "gate",
            "version": self.version,
            "model": {"identity": self.model, "name": self.model_name, "window_tokens": self.window_tokens},
            "device": self.device,
            "dtype": self.dtype,
            "r_p": self.r_p,
            "r_kv": self.r_kv,
            "contexts": list(self.contexts),
            "step_ms": {mode.value: list(self.step_ms[mode]) for mode in MODES},
            "selection_ms": list(self.selection_ms),
            "checks": [asdict(check) for check in self.checks],
            "steps": self.steps,
            "text": self.text,
        }


class Gate:
    """Chooses the fastest admissible mode of a request from a table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.costs = table.costs()
        self.modes = table.admissible()

    @classmethod
    def load(cls, path: Path | str, model: str, device: str) -> Gate:
        """Read a table for this model identity and device.

        Raises UserError when the file is none, is damaged, or was made for another model, device or version.
        """
        table = read_table(Path(path))
        for what, made_for, here in (
            ("model", table.model, model),
            ("device", table.device, device),
            ("version", table.version, version()),
        ):
            if made_for != here:
                raise UserError(
                    f"{Path(path).name} was made for {what} {made_for!r}, this is {here!r}; run `artifact gate` again"
                )
        return cls(table)

    def choose(self, prompt_tokens: int, new_tokens: int) -> Choice:
        """The fastest admissible mode of a request. Raises UserError for lengths outside the model's window.

        A prompt shorter than any that was timed keeps its whole cache: a share of so few entries was neither timed nor
        tested.
        """
        count("prompt_tokens", prompt_tokens, 1)
        count("new_tokens", new_tokens, 1)
        if prompt_tokens + new_tokens > self.table.window_tokens:
            raise UserError(
                f"{prompt_tokens} prompt and {new_tokens} new tokens exceed the window of {self.table.window_tokens}; "
                "ask for fewer"
            )
        request_ms = self.costs.request_ms
        short = prompt_tokens < self.table.contexts[0]
        modes = [mode for mode in self.modes if not short or mode in WHOLE_CACHE]
        times = [(request_ms(mode, prompt_tokens, new_tokens), mode) for mode in modes]
        best_ms, best = min(times, key=lambda pair: pair[0])
        return Choice(best, best_ms, times[0][0])


def version() -> str:
    """Version of this package: tables of another one may have been measured on other kernels."""
    return importlib.metadata.version("sparse-decoding-artifact")


def current_device(device: str) -> str:
    """The device that a table is valid for: the GPU's name, or the processor and the threads in use."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    from artifact.profiles import thread_count
    from artifact.system import cpu_model

    return f"{cpu_model() or 'unknown processor'}, {thread_count()} threads"


def model_identity(model: str) -> str:
    """Identity of a Hugging Face directory or GGUF file, as tables name it; hashes a file that is new to it."""
    from artifact.engine.checkpoints import open_checkpoint

    return open_checkpoint(model).identity


def read_table(path: Path) -> Table:
    """The table of a file. Raises UserError when it is none or is damaged."""
    record = read_json(path, SCHEMA)
    if record.get("kind") != "gate":
        raise UserError(f"{path.name} holds no gate table; `artifact gate` writes one")
    try:
        table = _from_record(record)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path.name} is damaged ({reason}); run `artifact gate` again") from None
    return table


def write_table(path: Path, table: Table) -> None:
    """Write a table, replacing an older one in one step. Raises UserError when the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, table.record())
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another --out") from None


def _from_record(record: Mapping[str, Any]) -> Table:
    model = record["model"]
    contexts = tuple(int(n) for n in record["contexts"])
    table = Table(
        version=str(record["version"]),
        model=str(model["identity"]),
        model_name=str(model["name"]),
        device=str(record["device"]),
        dtype=str(record["dtype"]),
        r_p=float(record["r_p"]),
        r_kv=float(record["r_kv"]),
        window_tokens=int(model["window_tokens"]),
        contexts=contexts,
        step_ms={mode: _times(record["step_ms"][mode.value], len(contexts)) for mode in MODES},
        selection_ms=_times(record["selection_ms"], len(contexts)),
        checks=tuple(Check(Mode(c["mode"]), str(c["name"]), c["passed"], str(c["detail"])) for c in record["checks"]),
        steps=int(record["steps"]),
        text=str(record["text"]),
    )
    table.costs()  # contexts that do not increase show here
    if any(check.passed not in (True, False, None) for check in table.checks):
        raise ValueError("a check has neither passed, failed nor been skipped")
    return table


def _times(values: Sequence[Any], expected: int) -> tuple[float, ...]:
    times = tuple(float(value) for value in values)
    if len(times) != expected or not all(math.isfinite(ms) and ms > 0 for ms in times):
        raise ValueError(f"{expected} positive times are needed, found {list(values)}")
    return times
