"""Seeded faults of `byte_account`: the account itself computes something else."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from artifact import account
from artifact.profiles import Profile
from artifact.shapes import Shape
from claims import byte_account as claim

PROFILE = Profile("embedded", "smollm2-135m", "cpu", "float32", None, 2)

Row = dict[str, Any]


def honest() -> list[Row]:
    """What `measure` stores, after the trip through JSON."""
    return [json.loads(json.dumps(claim.figure_row(check))) for check in claim.CHECKS]


def _recomputed(rows: list[Row], wrong: AbstractContextManager[object]) -> None:
    with wrong:
        rows[:] = honest()


def cache_charged_by_query_heads(rows: list[Row]) -> None:
    """Cache bytes are charged by query heads."""
    wrong = property(lambda shape: 2 * shape.heads * shape.head_dim)
    _recomputed(rows, mock.patch.object(Shape, "kv_values_per_token", wrong))


def head_forgotten(rows: list[Row]) -> None:
    """The output head is not read."""
    _recomputed(rows, mock.patch.object(account, "head_bytes", lambda shape, setting: 0.0))


def gate_forgotten(rows: list[Row]) -> None:
    """The feed-forward block has no gate."""
    wrong = property(lambda shape: 2 * shape.hidden * shape.intermediate)
    _recomputed(rows, mock.patch.object(Shape, "ffn_params", wrong))


def kv_ratio_ignored(rows: list[Row]) -> None:
    """The KV branch saves nothing, whatever its ratio."""
    _recomputed(rows, mock.patch.object(account, "kv_saving", lambda shape, setting, n: 0.0))


def decimal_k(rows: list[Row]) -> None:
    """K stands for 1,000 tokens."""
    _recomputed(rows, mock.patch("claims._byte_checks.K_TOKENS", 1000))


FAULTS = (cache_charged_by_query_heads, head_forgotten, gate_forgotten, kv_ratio_ignored, decimal_k)
