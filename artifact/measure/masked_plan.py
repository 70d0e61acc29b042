"""The arms and sizes that the gate-mask claims share, so that a calibration and a routing corpus are made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from artifact.errors import UserError
from artifact.measure.quality import Protocol
from artifact.profiles import Profile

METHODS = ("dense", "cats", "sats", "sats-inner")
TABLES = ("scores", "random")
RANDOM = "random"
RANK = 16  # of adapters; the paper's text does not print its rank
TARGETS = (0.3, 0.5)  # the paper's matched sparsities
FORMATS = ("float32", "bfloat16")  # of weights: the paper's Tables 6 and 7 and its Table 8; Table 5 has both


@dataclass(frozen=True)
class Arm:
    """One configuration. share: routed share of tokens by a table of `scores` or a `random` one of a seed; 1 routes
    all. adapter: name of a LoRA adapter in the data folder, RANDOM for untrained factors of the right shapes (timing
    only), empty for none; fused: its products ride on others.
    """

    method: str = "dense"
    sparsity: float = 0.0
    share: float = 1.0
    table: str = "scores"
    seed: int = 0
    adapter: str = ""
    fused: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS or self.table not in TABLES:
            raise UserError(
                f"no arm is called {self.method!r} with a table {self.table!r}; see artifact.measure.masked_plan"
            )
        if (self.method == "dense") != (self.sparsity == 0.0) or (self.method == "dense" and self.adapter):
            raise UserError(
                f"arm {self.method!r} does not go with sparsity {self.sparsity} and adapter {self.adapter!r}"
            )

    @property
    def label(self) -> str:
        """Short name for tables and records: dense, sats50, sats50-routed25, sats50-random25-1, sats50-lora."""
        if self.method == "dense":
            return "dense"
        parts = [f"{self.method}{100 * self.sparsity:g}"]
        if self.share < 1 and self.table == "scores":
            parts.append(f"routed{100 * self.share:g}")
        if self.share < 1 and self.table == "random":
            parts.append(f"random{100 * self.share:g}-{self.seed}")
        if self.adapter:
            parts.append("lora" if self.fused else "lora apart")
        return "-".join(parts)

    def record(self) -> dict[str, Any]:
        """Everything that decides what runs."""
        return asdict(self)


def arm_of(record: Mapping[str, Any]) -> Arm:
    """The arm of a cell's parameters."""
    return Arm(**{name: record[name] for name in Arm.__dataclass_fields__})


@dataclass(frozen=True)
class Sizes:
    """How much text a run looks at. calibration and corpus in tokens, cut into sequences; rows: positions whose local
    errors are averaged; the protocol of the scored windows.
    """

    calibration: int
    sequence: int
    rows: int
    corpus: int
    protocol: Protocol

    def record(self) -> dict[str, Any]:
        """For a cell's parameters."""
        return asdict(self)


def sizes_of(record: Mapping[str, Any]) -> Sizes:
    """The sizes of a cell's parameters."""
    return Sizes(**(dict(record) | {"protocol": Protocol(**record["protocol"])}))


# A prefill of 64 tokens is dense, as everywhere here; then a branch reads every token, as in the paper's evaluation.
EMBEDDED = Sizes(2048, 512, 256, 3072, Protocol(64, 256, 6))
QUICK = Sizes(1024, 512, 128, 1024, Protocol(64, 96, 4))
PAPER = Sizes(65536, 2048, 1024, 131072, Protocol(64, 1984, 24))
PAPER_QUICK = Sizes(16384, 2048, 512, 16384, Protocol(64, 960, 6))


def timed_formats(profile: Profile) -> tuple[str, ...]:
    """Formats in which steps are timed: both on a GPU; the kernels of a CPU hold float32 alone."""
    return FORMATS if profile.device == "cuda" else (profile.dtype,)


def sizes(profile: Profile, quick: bool) -> Sizes:
    """Sizes of a run in this profile."""
    if profile.name == "paper":
        return PAPER_QUICK if quick else PAPER
    return QUICK if quick else EMBEDDED
