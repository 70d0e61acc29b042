"""The byte account of a decode step: traffic, the crossover of two savings, speedup bounds and the latency crossing.

Pure arithmetic on dimensions and keep ratios (paper section 3); imports no torch and knows no kernel. Lengths are in
tokens; one sequence decodes unless `batch` says otherwise. The step reads the projections, the output head (also when
tied) and the cache; the embedding row, the norms and the activations are not counted.

    B_total(n) = L P s_w + vocab hidden s_w + L 2 kv_heads head_dim s_kv n
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from artifact.checks import count, finite, in_range, positive
from artifact.errors import UserError
from artifact.shapes import Shape

K_TOKENS = 1024


class Mode(StrEnum):
    """What a decode step leaves unread."""

    DENSE = "dense"
    PROJECTION = "projection"
    KV = "kv"
    BOTH = "both"


class Scope(StrEnum):
    """Which projections the projection branch may skip."""

    ALL = "all"
    FFN = "ffn"
    FFN_GATED = "ffn-gated"  # the gate decides, so it is read densely: only up and down shrink (CATS)


@dataclass(frozen=True)
class Setting:
    """An operating point of both branches.

    r_p, r_kv      share of projection weights and of cache entries read, in (0, 1]
    weight_bits    s_w in bits, scales included where a format stores them (4.5 is a value)
    kv_bits        s_kv in bits
    batch, u_b     sequences per step, and the share of weights that at least one of them activates (u_b >= r_p)
    budget_tokens  a fixed KV budget b in tokens; it replaces r_kv, which must then stay 1
    """

    r_p: float = 1.0
    r_kv: float = 1.0
    weight_bits: float = 16
    kv_bits: float = 16
    batch: int = 1
    u_b: float | None = None
    budget_tokens: int | None = None
    scope: Scope = Scope.ALL

    def __post_init__(self) -> None:
        in_range("r_p", self.r_p, 0, 1)
        in_range("r_kv", self.r_kv, 0, 1)
        in_range("weight bits", self.weight_bits, 0, 64)
        in_range("KV bits", self.kv_bits, 0, 64)
        count("batch", self.batch, 1)
        if self.u_b is not None:
            in_range("u_b", self.u_b, 0, 1)
            if self.u_b < self.r_p:
                raise UserError(f"u_b {self.u_b} is below r_p {self.r_p}; a batch reads what any sequence of it reads")
            if self.batch == 1 and self.u_b != self.r_p:
                raise UserError(f"u_b {self.u_b} differs from r_p {self.r_p} at batch 1; leave u_b out")
        elif self.batch > 1 and self.r_p < 1:
            raise UserError(
                f"batch {self.batch} needs u_b, the share of weights that any of its sequences activates (r_p to 1)"
            )
        if self.budget_tokens is not None:
            count("budget", self.budget_tokens, 1)
            if self.r_kv != 1:
                raise UserError(f"a budget of {self.budget_tokens} tokens replaces r_kv {self.r_kv}; give one of them")

    @property
    def weights_read(self) -> float:
        """Share of the weights in scope that the projection branch reads: u_b, or r_p for a single sequence."""
        return self.r_p if self.u_b is None else self.u_b

    def entries_read(self, n_tokens: float) -> float:
        """Cache entries of each sequence that the KV branch reads out of n."""
        if self.budget_tokens is not None:
            return min(float(self.budget_tokens), n_tokens)
        return self.r_kv * n_tokens


def scope_params(shape: Shape, scope: Scope) -> int:
    """Parameters of one layer that the projection branch may skip."""
    if scope is Scope.ALL:
        return shape.projection_params
    return shape.ffn_params if scope is Scope.FFN else 2 * shape.hidden * shape.intermediate


def projection_bytes(shape: Shape, setting: Setting) -> float:
    """Bytes of the seven projections of every layer."""
    return shape.layers * shape.projection_params * setting.weight_bits / 8


def head_bytes(shape: Shape, setting: Setting) -> float:
    """Bytes of the output head."""
    return shape.head_params * setting.weight_bits / 8


def kv_token_bytes(shape: Shape, kv_bits: float = 16) -> float:
    """Cache bytes of one token of one sequence over all layers, counted by KV heads."""
    return shape.layers * shape.kv_values_per_token * kv_bits / 8


def kv_bytes(shape: Shape, setting: Setting, n_tokens: float) -> float:
    """Cache bytes that a dense step of the whole batch reads at n tokens per sequence."""
    return setting.batch * kv_token_bytes(shape, setting.kv_bits) * _length(n_tokens)


def projection_saving(shape: Shape, setting: Setting) -> float:
    """Bytes per step that the projection branch leaves unread, at any context (section 3.2)."""
    return shape.layers * scope_params(shape, setting.scope) * (1 - setting.weights_read) * setting.weight_bits / 8


def kv_saving(shape: Shape, setting: Setting, n_tokens: float) -> float:
    """Bytes per step that the KV branch leaves unread at n tokens per sequence (section 3.2)."""
    skipped = _length(n_tokens) - setting.entries_read(n_tokens)
    return setting.batch * kv_token_bytes(shape, setting.kv_bits) * skipped


def step_bytes(shape: Shape, setting: Setting, n_tokens: float, mode: Mode = Mode.DENSE) -> float:
    """Bytes that one step reads at n tokens per sequence in the given mode (section 3.1)."""
    total = projection_bytes(shape, setting) + head_bytes(shape, setting) + kv_bytes(shape, setting, n_tokens)
    if mode in (Mode.PROJECTION, Mode.BOTH):
        total -= projection_saving(shape, setting)
    if mode in (Mode.KV, Mode.BOTH):
        total -= kv_saving(shape, setting, n_tokens)
    return total


def bound(shape: Shape, setting: Setting, n_tokens: float, mode: Mode) -> float:
    """Largest speedup over dense decoding that the bytes of the mode allow, B_total / (B_total - dB) (section 3.3)."""
    return step_bytes(shape, setting, n_tokens) / step_bytes(shape, setting, n_tokens, mode)


def n_star(shape: Shape, setting: Setting) -> float:
    """The context in tokens at which both branches save the same bytes (section 3.3).

    P (1 - u) s_w / (2 B kv_heads head_dim (1 - r_kv) s_kv), and b plus that with r_kv = 0 under a fixed budget b.
    0 when the projection branch saves nothing, infinite when only the KV branch saves nothing.
    """
    return _length_saving(shape, setting, projection_saving(shape, setting))


def latency_crossing(
    shape: Shape, setting: Setting, bandwidth_gbps: float, cost_p_ms: float, cost_kv_ms: float
) -> float:
    """The context in tokens at which both branches take the same time (section 4.3).

    Each branch pays its byte time plus a constant kernel cost, so the crossing is n* - (c_P - c_KV) / s. A length of 0
    means that the KV branch leads from the first token: the kernel cost of the projection branch exceeds its byte time.
    """
    positive("bandwidth", bandwidth_gbps)
    finite("kernel cost of the projection branch", cost_p_ms)
    finite("kernel cost of the KV branch", cost_kv_ms)
    cost_bytes = (cost_p_ms - cost_kv_ms) * bandwidth_gbps * 1e6
    return _length_saving(shape, setting, projection_saving(shape, setting) - cost_bytes)


def gap_ms_per_k(shape: Shape, setting: Setting, bandwidth_gbps: float) -> float:
    """s of section 4.3: growth of the byte-time gap in ms as the context gains 1,024 tokens."""
    positive("bandwidth", bandwidth_gbps)
    return K_TOKENS * _skipped_bytes_per_token(shape, setting) / (bandwidth_gbps * 1e6)


def step_ms(shape: Shape, setting: Setting, n_tokens: float, mode: Mode, bandwidth_gbps: float) -> float:
    """Byte time of one step in ms: its bytes at the given bandwidth, no kernel cost."""
    positive("bandwidth", bandwidth_gbps)
    return step_bytes(shape, setting, n_tokens, mode) / (bandwidth_gbps * 1e6)


def r_p_for(shape: Shape, setting: Setting, crossover_tokens: float) -> float:
    """The projection keep ratio at which n* falls on the given length (section 5.2 inverted).

    The r_p and u_b of the setting are ignored. Raises UserError where no ratio in (0, 1] gives that length.
    """
    positive("crossover", crossover_tokens)
    saved_per_token = _skipped_bytes_per_token(shape, setting)
    tokens = crossover_tokens - (setting.budget_tokens or 0)
    full = shape.layers * scope_params(shape, setting.scope) * setting.weight_bits / 8
    ratio = 1 - saved_per_token * tokens / full
    if not 0 < ratio <= 1:
        raise UserError(f"{shape.name}: no projection keep ratio puts the crossover at {crossover_tokens:,.0f} tokens")
    return ratio


def r_kv_for(shape: Shape, setting: Setting, crossover_tokens: float) -> float:
    """The KV keep ratio at which n* falls on the given length; the r_kv of the setting is ignored.

    Raises UserError where no ratio in (0, 1] gives that length, or under a fixed budget.
    """
    positive("crossover", crossover_tokens)
    if setting.budget_tokens is not None:
        raise UserError("a fixed token budget has no keep ratio to solve for; leave the budget out")
    full = setting.batch * kv_token_bytes(shape, setting.kv_bits) * crossover_tokens
    ratio = 1 - projection_saving(shape, setting) / full
    if not 0 < ratio <= 1:
        raise UserError(f"{shape.name}: no KV keep ratio puts the crossover at {crossover_tokens:,.0f} tokens")
    return ratio


def ffn_bound(shape: Shape, keep: float, scope: Scope = Scope.FFN_GATED) -> float:
    """Largest speedup of the feed-forward block alone at a neuron keep ratio.

    With a dense gate only up and down shrink, so half of the neurons is at most 3 / 2 and none is 3.
    """
    in_range("keep ratio", keep, 0, 1)
    if scope is Scope.ALL:
        raise UserError("the feed-forward bound is of a feed-forward scope; use ffn or ffn-gated")
    return shape.ffn_params / (shape.ffn_params - scope_params(shape, scope) * (1 - keep))


def _skipped_bytes_per_token(shape: Shape, setting: Setting) -> float:
    """KV bytes a step leaves unread for each token past the budget."""
    skipped = 1 - setting.r_kv if setting.budget_tokens is None else 1.0
    return setting.batch * kv_token_bytes(shape, setting.kv_bits) * skipped


def _length_saving(shape: Shape, setting: Setting, saving_bytes: float) -> float:
    """The context at which the KV branch leaves `saving_bytes` unread."""
    if saving_bytes <= 0:
        return 0.0
    per_token = _skipped_bytes_per_token(shape, setting)
    return (setting.budget_tokens or 0) + saving_bytes / per_token if per_token else math.inf


def _length(n_tokens: float) -> float:
    if finite("context", n_tokens) < 0:
        raise UserError(f"context is {n_tokens} tokens; give 0 or more")
    return n_tokens
