"""Seeded faults of `token_routing`, on windows and steps under routed and random tables."""

from __future__ import annotations

from ._sats import PAPER, Row, changed, routing_rows, slower, worse

PROFILE = PAPER
honest = routing_rows


def routed_is_random(rows: list[Row]) -> None:
    """The routing table is that of another tokenizer"""
    worse("sats50-routed50", 0.2)(rows)


def more_tokens_are_sparse(rows: list[Row]) -> None:
    """More tokens take the sparse path than asked for"""
    changed("window", "held_out_share", lambda s: s + 0.2, "routed50")(rows)


def routing_costs_more_than_it_saves(rows: list[Row]) -> None:
    """Every token takes the dense path after asking the table"""
    slower("sats50-routed50", 1.3)(rows)


FAULTS = (routed_is_random, more_tokens_are_sparse, routing_costs_more_than_it_saves)
