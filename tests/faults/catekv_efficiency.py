"""Seeded faults of `catekv_efficiency`, on entries and step times that follow from its masks."""

from __future__ import annotations

from ._kv import EMBEDDED, Row, efficiency_rows, timing

PROFILE = EMBEDDED
honest = efficiency_rows


def _timed(rows: list[Row], steps: list[Row]) -> None:
    rows[:] = [row for row in rows if row["kind"] != "timing"] + steps


def one_entry_too_many(rows: list[Row]) -> None:
    """A kernel off by one: a head keeps one entry more than its mask"""
    _timed(rows, timing(extra_entries=1))


def padded_storage(rows: list[Row]) -> None:
    """Every head keeps a slot for every token: nothing is given back"""
    _timed(rows, [row | {"storage_bytes": 512 * 90 * 7936} for row in timing()])


def slower_than_dense(rows: list[Row]) -> None:
    """The ragged kernel takes longer than the bytes it saves"""
    _timed(rows, timing(0.9))


FAULTS = (one_entry_too_many, padded_storage, slower_than_dense)
