"""Which sparsity, when: every method of the four papers on one model's byte account, side by side. Pure arithmetic.

A method leaves unread a share of the weights or of the cache, metadata included. Its bound is the dense step's bytes
over its own; its crossover is the context from which it saves more bytes than thresholded projections at 50%. Saying
`memory` means that what it holds shrinks as well, not only what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from artifact.account import Scope, Setting, head_bytes, projection_bytes, scope_params
from artifact.keep_ratio import channel_r_kv, headwise_r_kv, paged_r_kv, pruned_key_bytes
from artifact.shapes import Shape

KEEP_P, KEEP_KV = 0.5, 0.3
PAGE_TOKENS = 16
CATEKV_SHARE, CATEKV_ETA, CATEKV_BUDGET = 0.4, 1.0, 2048
CONTEXTS = (8192, 32768, 131072)
LIMIT_TOKENS = 1 << 24


@dataclass(frozen=True)
class Method:
    """paper: where it comes from; saved: bytes of a step at n tokens that it leaves unread; memory: whether it holds
    less; choice: when it decides what to read.
    """

    name: str
    paper: str
    reads_less_of: str
    saved: Callable[[float], float]
    memory: bool
    choice: str


def methods(shape: Shape, element_bytes: int = 2) -> list[Method]:
    """All methods at the operating points of their papers."""
    dim = shape.head_dim
    width = 2 * dim * element_bytes

    def weights(scope: Scope) -> Callable[[float], float]:
        skipped = shape.layers * scope_params(shape, scope) * (1 - KEEP_P) * element_bytes
        return lambda n: skipped

    def cache(r_kv: Callable[[float], float]) -> Callable[[float], float]:
        return lambda n: (1 - r_kv(n)) * n * shape.layers * shape.kv_heads * width

    def channels(keep: float, spark: bool) -> float:
        kept = math.floor(keep * dim + 0.5)
        stored = pruned_key_bytes(dim, kept, element_bytes, mask=spark, signs=spark, statistics=int(spark))
        return channel_r_kv(stored, dim * element_bytes, dim, element_bytes)

    def fixed(r_kv: float) -> Callable[[float], float]:
        return cache(lambda n: r_kv)

    def catekv(n: float) -> float:
        return headwise_r_kv(max(1, math.ceil(n)), CATEKV_SHARE, CATEKV_ETA, CATEKV_BUDGET)

    at = f"{KEEP_KV:.0%}"
    return [
        Method(f"TEAL {KEEP_P:.0%}", "crossover", "weights", weights(Scope.ALL), False, "every token"),
        Method(f"SATS {KEEP_P:.0%} of the MLP", "sats", "weights", weights(Scope.FFN_GATED), False, "every token"),
        Method(f"CATS {KEEP_P:.0%} of the MLP", "sats", "weights", weights(Scope.FFN_GATED), False, "every token"),
        Method(f"window {at}", "crossover", "cache", fixed(KEEP_KV), True, "position"),
        Method(f"SnapKV {at}", "crossover", "cache", fixed(KEEP_KV), True, "once, prompt"),
        Method(f"PyramidKV {at}", "catekv", "cache", fixed(KEEP_KV), True, "once, prompt"),
        Method(f"Quest {at}, pages of {PAGE_TOKENS}", "catekv", "cache", fixed(paged_r_kv(KEEP_KV, PAGE_TOKENS)), False,
               "every query"),
        Method("CateKV r = 0.4", "catekv", "cache", cache(catekv), True, "once, reference set"),
        Method("ThinK 50% of keys", "spark", "cache", fixed(channels(0.5, False)), True, "once, prompt"),
        Method("SparK 50% of keys", "spark", "cache", fixed(channels(0.5, True)), True, "once, prompt"),
        Method("SparK 80% of keys", "spark", "cache", fixed(channels(0.2, True)), True, "once, prompt"),
        Method(f"SnapKV {at}, SparK 80%", "spark", "cache", fixed(KEEP_KV * channels(0.2, True)), True, "once, prompt"),
    ]  # fmt: skip


def crossover_tokens(method: Method, against: float) -> float:
    """Least context at which a method saves `against` bytes a step; infinite beyond LIMIT_TOKENS."""
    if method.saved(LIMIT_TOKENS) < against:
        return math.inf
    low, high = 0.0, float(LIMIT_TOKENS)
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (low, middle) if method.saved(middle) >= against else (middle, high)
    return high


def rows(shape: Shape) -> list[dict[str, Any]]:
    """One row per method: bounds at CONTEXTS and the crossover against thresholded projections."""
    fixed = projection_bytes(shape, Setting()) + head_bytes(shape, Setting())
    found = methods(shape)
    reference = found[0].saved(0)
    stored = []
    for method in found:
        steps = {n: fixed + n * shape.layers * shape.kv_values_per_token * 2 for n in CONTEXTS}
        bounds = {str(n): total / (total - method.saved(n)) for n, total in steps.items()}
        crossing = None if method.reads_less_of == "weights" else crossover_tokens(method, reference)
        stored.append({
            "kind": "method",
            "name": method.name,
            "from": method.paper,
            "reads_less_of": method.reads_less_of,
            "memory": method.memory,
            "choice": method.choice,
            "bounds": bounds,
            "crossover_tokens": crossing,
            "model": shape.name,
        })  # fmt: skip
    return stored
