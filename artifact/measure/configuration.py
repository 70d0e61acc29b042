"""One configuration of a decode step, as asked for, and the check that what ran is what was asked.

A configuration joins a projection keep ratio, a KV method and its keep ratio. Perplexity, retrieval and timing all
take it from here, so that one setting serves all three; a keep ratio of 1 disables a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch

from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.models import Weights
from artifact.errors import UserError
from artifact.kv.retain import budget
from artifact.kv.snapkv import SnapKV
from artifact.kv.window import Window
from artifact.projection.thresholds import Thresholds

Method = Literal["full", "snapkv", "window"]
METHODS: tuple[Method, ...] = ("full", "snapkv", "window")
R_P_TOLERANCE = 0.05  # thresholds are calibrated on other text, so the counted share moves by some points


@dataclass(frozen=True)
class Configuration:
    """r_p: share of projection channels read; r_kv: share of cached entries read, by `method`.

    Raises UserError for a ratio outside (0, 1] and for a ratio without a method or a method without a ratio: a label
    must never promise what does not run.
    """

    r_p: float = 1.0
    r_kv: float = 1.0
    method: Method = "full"
    snapkv: SnapKV = field(default_factory=SnapKV)
    window: Window = field(default_factory=Window)

    def __post_init__(self) -> None:
        for name, value in (("projection keep ratio r_p", self.r_p), ("KV keep ratio r_kv", self.r_kv)):
            if not 0.0 < value <= 1.0:
                raise UserError(f"{name} is {value}; give a number above 0 and at most 1")
        if self.method not in METHODS:
            raise UserError(f"no KV method is called {self.method!r}; choose one of {', '.join(METHODS)}")
        if (self.method == "full") != (self.r_kv == 1.0):
            raise UserError(f"KV method {self.method!r} does not go with r_kv = {self.r_kv}; 'full' goes with 1 alone")

    @property
    def label(self) -> str:
        """Short name for tables and records: dense, p50, kv30, window30, p50+kv30."""
        parts = [f"p{100 * self.r_p:g}"] if self.r_p < 1 else []
        if self.method != "full":
            parts.append(f"{'kv' if self.method == 'snapkv' else 'window'}{100 * self.r_kv:g}")
        return "+".join(parts) or "dense"

    @property
    def kind(self) -> Literal["dense", "single", "composed"]:
        """How many branches are on."""
        on = (self.r_p < 1) + (self.method != "full")
        return ("dense", "single", "composed")[on]

    def record(self) -> dict[str, Any]:
        """Everything that decides what runs, for a stored row."""
        parameters: dict[str, Any] = {}
        if self.method != "full":
            parameters = asdict(self.snapkv if self.method == "snapkv" else self.window)
        return {"label": self.label, "r_p": self.r_p, "r_kv": self.r_kv, "method": self.method, "kv": parameters}


def from_record(record: Mapping[str, Any]) -> Configuration:
    """The configuration of a stored row or of a cell's parameters."""
    method, parameters = record["method"], dict(record.get("kv") or {})
    return Configuration(
        r_p=float(record["r_p"]),
        r_kv=float(record["r_kv"]),
        method=method,
        snapkv=SnapKV(**parameters) if method == "snapkv" else SnapKV(),
        window=Window(**parameters) if method == "window" else Window(),
    )


class Calibrated(Protocol):
    """What thresholds come from: uniform quantiles or a greedy allocation."""

    def thresholds(self, keep: float) -> Thresholds: ...


@dataclass(frozen=True)
class Branch:
    """What a configuration comes to on one prompt: None reads everything."""

    thresholds: Thresholds | None
    packed: PackedCache | None


def bind(
    configuration: Configuration,
    weights: Weights,
    calibration: Calibrated | None,
    cache: KVCache,
    queries: Sequence[torch.Tensor],
    reserve: int,
) -> Branch:
    """Apply a configuration to a prefilled prompt; the cache is read and left as it is.

    queries: per layer (heads, >= rows, d), rotated queries of the last prompt tokens. Raises UserError when a
    projection ratio is asked without calibration, RuntimeError when what was retained is not what was asked.
    """
    thresholds = None
    if configuration.r_p < 1:
        if calibration is None:
            raise UserError(f"{configuration.label} needs calibrated thresholds; calibrate on text first")
        thresholds = calibration.thresholds(configuration.r_p)
    packed = None
    if configuration.method == "snapkv":
        scale = weights.shape.head_dim**-0.5
        packed = configuration.snapkv.select(cache, queries, configuration.r_kv, scale, reserve)
    elif configuration.method == "window":
        packed = configuration.window.select(cache, configuration.r_kv, reserve)
    if packed is not None:
        check_retained(configuration, cache, packed)
    return Branch(thresholds, packed)


def check_retained(configuration: Configuration, cache: KVCache, packed: PackedCache) -> None:
    """Raise RuntimeError unless every head kept the exact budget, by position for a window and not so for a
    selection.
    """
    wanted = budget(cache.tokens, configuration.r_kv)
    if not bool((packed.lengths == wanted).all()):
        found = f"{int(packed.lengths.min())} to {int(packed.lengths.max())}"
        raise RuntimeError(f"{configuration.label} retained {found} entries per head, asked were {wanted}")
    sinks = Window(configuration.window.sinks if configuration.method == "window" else configuration.snapkv.sinks)
    index = sinks.index(cache.tokens, configuration.r_kv).to(cache.keys.device)
    same = [
        bool(torch.equal(packed.keys[layer][:, :wanted], cache.keys[layer][:, index]))
        for layer in range(cache.keys.shape[0])
    ]
    if configuration.method == "window" and not all(same):
        raise RuntimeError(f"{configuration.label} holds other entries than its sinks and most recent ones")
    if configuration.method == "snapkv" and all(same) and wanted < cache.tokens:
        room = wanted - configuration.snapkv.rows - configuration.snapkv.sinks
        if room > 0:
            raise RuntimeError(f"{configuration.label} retained exactly a sink-plus-recent window, not a selection")


def check_r_p(configuration: Configuration, counted: float, tolerance: float = R_P_TOLERANCE) -> None:
    """Raise RuntimeError when the counted share of projection bytes is not the one asked for."""
    if configuration.r_p == 1.0:
        if counted != 1.0:
            raise RuntimeError(f"{configuration.label} read {counted:.3f} of the projections, asked was all")
    elif abs(counted - configuration.r_p) > tolerance:
        raise RuntimeError(
            f"{configuration.label} read {counted:.3f} of the projection bytes, asked was {configuration.r_p}"
        )
