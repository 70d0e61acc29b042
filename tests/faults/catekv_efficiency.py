"""Seeded faults of `catekv_efficiency`, on entries and step times that follow from its masks."""

from __future__ import annotations

from ._kv import EMBEDDED, Row, batches, efficiency_rows, timing

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


def one_after_the_other(rows: list[Row]) -> None:
    """The ragged batch decodes its sequences one by one: every one reads the weights anew"""
    for row in rows:
        if row["kind"] == "equal_memory" and row["label"] == "catekv":
            row["ms"] = [ms * row["batch"] for ms in row["ms"]]


def one_cache_for_all(rows: list[Row]) -> None:
    """All sequences of a batch read one cache, which the last-level cache serves: faster than their bytes"""
    rows[:] = [row for row in rows if row["kind"] != "equal_memory"] + batches(1.5)


def beyond_the_budget(rows: list[Row]) -> None:
    """The larger batch holds more memory than was to be shared"""
    for row in rows:
        if row["kind"] == "equal_memory" and row["label"] == "catekv":
            row["held_bytes"] = 2 * row["budget_bytes"]


FAULTS = (
    one_entry_too_many, padded_storage, slower_than_dense, one_after_the_other, one_cache_for_all, beyond_the_budget,
)  # fmt: skip
