"""KV methods by name, for claims that compare them: what a stored arm runs, on one prefilled prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.pruned import everything
from artifact.errors import UserError
from artifact.kv.branch import KVBranch
from artifact.kv.catekv import CateKV
from artifact.kv.pyramidkv import PyramidKV
from artifact.kv.quest import Quest
from artifact.kv.snapkv import SnapKV
from artifact.kv.spark import SparK
from artifact.kv.think import ThinK
from artifact.kv.window import Window


@dataclass(frozen=True)
class Arm:
    """label: its name in tables; method: one of METHODS; options: that method's parameters; keep: share of the prompt's
    entries that an evicting method retains, before channels are pruned.

    spark and think prune what SnapKV leaves at `keep`, or everything at 1. catekv takes its head types as "adaptive",
    (L, kv_heads) of 0 and 1; with "quest" it pages the adaptive heads.
    """

    label: str
    method: str
    keep: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"no KV method is called {self.method!r}; choose one of {', '.join(METHODS)}")

    def record(self) -> dict[str, Any]:
        """What a cell's parameters and a row keep of it."""
        return asdict(self)

    @property
    def simulated(self) -> bool:
        """Whether only quality may be read off this arm: no bytes are saved where it runs."""
        return self.method == "spark" and SparK(**self.options).simulated


def from_record(record: Mapping[str, Any]) -> Arm:
    """The arm of a cell's parameters."""
    return Arm(record["label"], record["method"], float(record["keep"]), dict(record["options"]))


def bind(arm: Arm, full: KVCache, queries: Sequence[torch.Tensor], scale: float, reserve: int) -> KVBranch | None:
    """Apply an arm to a prefilled prompt; None is dense. The cache is read and left as it is.

    queries: per layer (heads, >= rows, d), rotated queries of the last prompt tokens.
    """
    options = dict(arm.options)
    if arm.method == "dense":
        return None
    if arm.method == "window":
        return Window(**options).select(full, arm.keep, reserve)
    if arm.method == "snapkv":
        return SnapKV(**options).select(full, queries, arm.keep, scale, reserve)
    if arm.method == "pyramidkv":
        return PyramidKV(**options).select(full, queries, arm.keep, scale, reserve)
    if arm.method == "quest":
        return Quest(arm.keep, **options).select(full, reserve)
    if arm.method == "catekv":
        return _catekv(options, full, queries, scale, reserve)
    source = everything(full) if arm.keep == 1 else SnapKV().select(full, queries, arm.keep, scale, 0)
    pruning: SparK | ThinK = SparK(**options) if arm.method == "spark" else ThinK(**options)
    return pruning.compress(source, queries, reserve)


METHODS = ("dense", "window", "snapkv", "pyramidkv", "quest", "catekv", "spark", "think")


def _catekv(
    options: dict[str, Any], full: KVCache, queries: Sequence[torch.Tensor], scale: float, reserve: int
) -> KVBranch:
    adaptive = torch.tensor(options.pop("adaptive"), dtype=torch.bool)
    paging = options.pop("quest", None)
    ragged = CateKV(**options).select(full, queries, adaptive, scale, reserve)
    return ragged if paging is None else Quest(**paging).over(ragged, adaptive)


def kept_share(branch: KVBranch | None, full: KVCache) -> float:
    """Stored share of the prompt's bytes, metadata included: what the branch reads and holds of it before decoding.

    For Quest this is the share in memory, which its choice does not lower.
    """
    dense = full.lengths.numel() * full.tokens * 2 * full.keys.shape[3] * full.keys.element_size()
    if branch is None:
        return 1.0
    if isinstance(branch, PackedCache):
        return float(branch.lengths.sum()) * branch.entry_bytes / dense
    return (branch.fixed_bytes + float(branch.lengths.sum()) * branch.entry_bytes) / dense
