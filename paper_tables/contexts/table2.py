"""Table 2 of the crossover paper: byte crossover, cost-aware prediction and measured crossing of every pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_tables.render import Figure, Row, TableMissing

CLAIMS = ("crossover",)
K_TOKENS = 1024


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per pair, all in K tokens. Raises TableMissing when the run located no crossing."""
    findings = results.get("claims", {}).get("crossover", {}).get("findings", [])
    located = [finding for finding in findings if "measured_tokens" in finding.get("extra", {})]
    if not located or not rows:
        raise TableMissing("no crossing was located in this run")
    origin = rows[0]["origin"]
    figures = paper["crossover"]["figures"]
    return {
        "blocks": str(located[0]["interval"]["n"]),
        "text": str(rows[0]["text"]),
        "rows": [_row(finding, origin) for finding in located],
        "paper": {
            key: Figure(f"{figures[f'crossing.gap.{key}']['printed']}K", "paper")
            for key in ("a100", "a6000", "transfer")
        },
    }


def _row(finding: Mapping[str, Any], origin: str) -> dict[str, Any]:
    extra, interval = finding["extra"], finding["interval"]
    return {
        "pair": f"{extra['r_p']:.0%} / {extra['r_kv']:.0%}",
        "verdict": finding["verdict"],
        "cells": [
            Figure(_k(extra["n_star_tokens"]), origin),
            Figure(_k(extra["predicted_tokens"]), origin),
            Figure(_k(extra["measured_tokens"]), origin),
            Figure(f"[{_k(extra['measured_low_tokens'])}, {_k(extra['measured_high_tokens'])}]", origin),
            Figure(f"[{_k(interval['low'])}, {_k(interval['high'])}]", origin),
            Figure(f"{_k(finding['region']['high'])} ({extra['region_ms']:.2f} ms)", origin),
            Figure(f"{extra['cost_p_ms']:.2f} / {extra['cost_kv_ms']:.2f}", origin),
        ],
    }


def _k(tokens: float | None) -> str:
    """Tokens as K with two decimals; a bound that is not finite as a dash."""
    return "--" if tokens is None else f"{tokens / K_TOKENS:.2f}"
