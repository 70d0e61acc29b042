"""`artifact predict MODEL`: the byte crossover, the speedup bounds over context and the predicted latency crossing.

Needs no weights: dimensions come from a model name or a config.json. The numbers are those of `artifact.account`; this
file only reads options and prints.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from artifact import account
from artifact.account import K_TOKENS, Mode, Scope, Setting
from artifact.errors import UserError
from artifact.shapes import Shape, shape_from

FIRST_CONTEXT = 2 * K_TOKENS
MAX_CONTEXTS = 64
MODES = (Mode.PROJECTION, Mode.KV, Mode.BOTH)


@dataclass(frozen=True)
class Hardware:
    """What turns bytes into time: effective bandwidth, and the kernel cost of each branch beyond its byte time."""

    bandwidth_gbps: float
    cost_p_ms: float
    cost_kv_ms: float


def predict(shape: Shape, setting: Setting, contexts: Sequence[int], hardware: Hardware | None) -> dict[str, Any]:
    """All predicted figures as one JSON-ready object; a length that does not exist is null."""
    crossing = account.n_star(shape, setting)
    report: dict[str, Any] = {
        "model": shape.name,
        "window_tokens": shape.window,
        "setting": {
            "r_p": setting.r_p,
            "r_kv": None if setting.budget_tokens else setting.r_kv,
            "budget_tokens": setting.budget_tokens,
            "weight_bits": setting.weight_bits,
            "kv_bits": setting.kv_bits,
            "batch": setting.batch,
            "u_b": setting.weights_read,
            "scope": setting.scope.value,
        },
        "projection_params_per_layer": shape.projection_params,
        "projection_bytes": account.projection_bytes(shape, setting),
        "head_bytes": account.head_bytes(shape, setting),
        "kv_bytes_per_k_tokens": account.kv_token_bytes(shape, setting.kv_bits) * K_TOKENS,
        "n_star_tokens": _finite(crossing),
        "contexts": [_context(shape, setting, n, crossing) for n in contexts],
    }
    if hardware is not None:
        latency = account.latency_crossing(
            shape, setting, hardware.bandwidth_gbps, hardware.cost_p_ms, hardware.cost_kv_ms
        )
        report["bandwidth_gbps"] = hardware.bandwidth_gbps
        report["cost_p_ms"], report["cost_kv_ms"] = hardware.cost_p_ms, hardware.cost_kv_ms
        report["gap_ms_per_k_tokens"] = account.gap_ms_per_k(shape, setting, hardware.bandwidth_gbps)
        report["n_lat_tokens"] = _finite(latency)
        for row in report["contexts"]:
            row["ms"] = _times(shape, setting, row["tokens"], hardware)
    return report


def _context(shape: Shape, setting: Setting, n_tokens: int, crossing: float) -> dict[str, Any]:
    saves = account.projection_saving(shape, setting) > 0 or account.kv_saving(shape, setting, n_tokens) > 0
    leader = (Mode.PROJECTION if n_tokens < crossing else Mode.KV) if saves and n_tokens != crossing else None
    return {
        "tokens": n_tokens,
        "within_window": n_tokens <= shape.window,
        "step_bytes": account.step_bytes(shape, setting, n_tokens),
        "bound": {mode.value: account.bound(shape, setting, n_tokens, mode) for mode in MODES},
        "leads_by_bytes": leader.value if leader else None,
    }


def _times(shape: Shape, setting: Setting, n_tokens: int, hardware: Hardware) -> dict[str, float]:
    cost_ms = {
        Mode.DENSE: 0.0,
        Mode.PROJECTION: hardware.cost_p_ms,
        Mode.KV: hardware.cost_kv_ms,
        Mode.BOTH: hardware.cost_p_ms + hardware.cost_kv_ms,
    }
    return {
        mode.value: account.step_ms(shape, setting, n_tokens, mode, hardware.bandwidth_gbps) + cost
        for mode, cost in cost_ms.items()
    }


def _finite(tokens: float) -> float | None:
    return tokens if math.isfinite(tokens) else None


def render(report: dict[str, Any]) -> str:
    """The report as text: what was assumed, the crossings, then one line per context."""
    from tabulate import tabulate

    setting = report["setting"]
    kv = f"{setting['budget_tokens']:,} tokens" if setting["budget_tokens"] else f"{setting['r_kv']:.0%} of entries"
    union = f" (union of {setting['batch']} sequences)" if setting["batch"] > 1 else ""
    lines = [
        f"{report['model']}: {report['projection_bytes'] / 1e9:.3f} GB projections, "
        f"{report['head_bytes'] / 1e9:.3f} GB head, {report['kv_bytes_per_k_tokens'] / 1e6:.1f} MB cache per 1K tokens",
        f"projection branch reads {setting['u_b']:.1%} of {_SCOPE_TEXT[setting['scope']]}{union}; "
        f"KV branch reads {kv}; {setting['weight_bits']:g}-bit weights, {setting['kv_bits']:g}-bit cache",
        "",
        f"byte crossover n*           {_byte_crossing_text(report)}",
    ]
    if "n_lat_tokens" in report:
        cost = report["cost_p_ms"] - report["cost_kv_ms"]
        lines.append(
            f"predicted latency crossing  {_crossing_text(report['n_lat_tokens'], report['window_tokens'])}; the gap "
            f"grows {report['gap_ms_per_k_tokens']:.3f} ms per 1K at {report['bandwidth_gbps']:g} GB/s, "
            f"c_P - c_KV = {cost:g} ms"
        )
    headers = ["context", "step GB", "P bound", "KV bound", "both bound", "more bytes saved"]
    if "n_lat_tokens" in report:
        headers += ["dense ms", "P ms", "KV ms", "both ms"]
    cells = [_cells(row) for row in report["contexts"]]
    lines += ["", tabulate(cells, headers, disable_numparse=True, stralign="right")]
    if not all(row["within_window"] for row in report["contexts"]):
        lines.append(f"* beyond the model's window of {_tokens_text(report['window_tokens'])}")
    return "\n".join(lines)


_SCOPE_TEXT = {
    Scope.ALL.value: "all seven projections",
    Scope.FFN.value: "gate, up and down",
    Scope.FFN_GATED.value: "up and down (gate dense)",
}


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [
        _tokens_text(row["tokens"]) + ("" if row["within_window"] else "*"),
        f"{row['step_bytes'] / 1e9:.3f}",
        *(f"{row['bound'][mode.value]:.3f}x" for mode in MODES),
        row["leads_by_bytes"] or "equal",
    ]
    return cells + [f"{ms:.3f}" for ms in row.get("ms", {}).values()]


def _tokens_text(tokens: float) -> str:
    return f"{tokens / K_TOKENS:.4g}K" if tokens >= K_TOKENS and tokens % K_TOKENS == 0 else f"{tokens:,.0f}"


def _byte_crossing_text(report: dict[str, Any]) -> str:
    setting = report["setting"]
    if setting["u_b"] == 1 and setting["r_kv"] == 1:
        return "none: neither branch saves a byte"
    return _crossing_text(report["n_star_tokens"], report["window_tokens"])


def _crossing_text(tokens: float | None, window: int) -> str:
    if tokens is None:
        return "none: the KV branch saves nothing"
    if tokens == 0:
        return "none: the KV branch leads from the first token"
    digits = 1 if tokens >= 10 * K_TOKENS else 2
    place = "inside" if tokens <= window else "beyond"
    return f"{tokens / K_TOKENS:.{digits}f}K ({tokens:,.0f} tokens), {place} the {_tokens_text(window)} window"


def contexts_from(values: Sequence[str], shape: Shape) -> list[int]:
    """Context lengths in tokens from texts like "2K", "4096" or "2K,8K"; by default powers of two up to the window."""
    texts = [text.strip() for value in values for text in value.split(",")]
    if not texts:
        powers = [FIRST_CONTEXT << i for i in range(30) if FIRST_CONTEXT << i < shape.window]
        return [*powers, shape.window]
    if len(texts) > MAX_CONTEXTS:
        raise UserError(f"{len(texts)} contexts were given; give at most {MAX_CONTEXTS}")
    return sorted({_context_tokens(text) for text in texts})


def _context_tokens(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,10}(?:\.[0-9]{1,3})?)([kK]?)", text)
    tokens = float(match[1]) * (K_TOKENS if match[2] else 1) if match else 0.0
    if not 1 <= tokens <= 1 << 30 or tokens != int(tokens):
        raise UserError(f"context {text[:40]!r} is not a number of tokens; give whole tokens like 4096, or K like 4K")
    return int(tokens)


def hardware_from(bandwidth: float | None, cost_p: float | None, cost_kv: float | None) -> Hardware | None:
    """The hardware options as one value; a kernel cost says nothing without a bandwidth."""
    if bandwidth is None:
        if cost_p is not None or cost_kv is not None:
            raise UserError("--cost-p and --cost-kv need --bandwidth, the effective GB/s of the machine")
        return None
    return Hardware(bandwidth, cost_p or 0.0, cost_kv or 0.0)


@click.command("predict")
@click.argument("model")
@click.option("--r-p", type=float, default=0.5, show_default=True, help="Projection keep ratio r_P.")
@click.option("--r-kv", type=float, default=None, help="KV keep ratio r_KV.  [default: 0.3]")
@click.option("--weights-bits", type=float, default=16, show_default=True, help="Bits per weight, scales included.")
@click.option("--kv-bits", type=float, default=16, show_default=True, help="Bits per cache element.")
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences per step.")
@click.option("--u-b", type=float, default=None, help="Share of weights that any sequence of the batch activates.")
@click.option("--budget-tokens", type=int, default=None, help="Fixed KV budget in tokens, instead of --r-kv.")
@click.option("--bandwidth", type=float, default=None, help="Effective GB/s; adds times and the latency crossing.")
@click.option("--cost-p", type=float, default=None, help="Kernel cost of the projection branch, ms per step.")
@click.option("--cost-kv", type=float, default=None, help="Kernel cost of the KV branch, ms per step.")
@click.option("--context", "contexts", multiple=True, help="Context like 4096 or 4K; repeat or separate by commas.")
@click.option("--ffn-only", is_flag=True, help="Only gate, up and down are sparse.")
@click.option("--gate-dense", is_flag=True, help="With --ffn-only: the gate is read densely (CATS).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    r_p: float,
    r_kv: float | None,
    weights_bits: float,
    kv_bits: float,
    batch: int,
    u_b: float | None,
    budget_tokens: int | None,
    bandwidth: float | None,
    cost_p: float | None,
    cost_kv: float | None,
    contexts: tuple[str, ...],
    ffn_only: bool,
    gate_dense: bool,
    as_json: bool,
) -> None:
    """Predict where the branches cross, from dimensions alone.

    MODEL is a published model (Llama-3.1-8B), a config.json or a checkpoint directory.
    """
    if gate_dense and not ffn_only:
        raise UserError("--gate-dense describes the feed-forward block; add --ffn-only")
    if r_kv is None:
        r_kv = 1.0 if budget_tokens is not None else 0.3
    elif budget_tokens is not None:
        raise UserError("--budget-tokens replaces --r-kv; give one of them")
    scope = Scope.FFN_GATED if gate_dense else Scope.FFN if ffn_only else Scope.ALL
    setting = Setting(r_p, r_kv, weights_bits, kv_bits, batch, u_b, budget_tokens, scope)
    shape = shape_from(model)
    report = predict(shape, setting, contexts_from(contexts, shape), hardware_from(bandwidth, cost_p, cost_kv))
    click.echo(json.dumps(report, separators=(",", ":"), allow_nan=False) if as_json else render(report))
