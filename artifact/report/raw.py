"""Raw rows of a claim as compact tables: one per kind of row, what is the same in all of them said once.

Lists of samples are shown by their count and median; the line number leads to all of them in samples.jsonl.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from artifact.report.console import number
from artifact.samples import Row

ROWS_SHOWN = 400  # of one table, so that the page stays light; the rest is named by line
HIDDEN = ("claim", "profile", "cell", "block")


@dataclass(frozen=True)
class RawTable:
    """Columns and rows as text. `lines`: line numbers in samples.jsonl; `left_out`: how many rows are not shown."""

    columns: tuple[str, ...]
    lines: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]
    constant: tuple[tuple[str, str], ...]
    left_out: int


def tables(rows: Sequence[tuple[int, Row]]) -> list[RawTable]:
    """Tables of the rows of one claim, rows with the same columns together, in file order."""
    by_columns: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for line, row in rows:
        by_columns.setdefault(tuple(sorted(row)), []).append((line, row))
    return [_table(columns, group) for columns, group in by_columns.items()]


def _table(columns: tuple[str, ...], rows: list[tuple[int, Row]]) -> RawTable:
    texts = {name: [cell_text(row[name]) for _, row in rows] for name in columns if name not in HIDDEN}
    varying = [name for name, values in texts.items() if len(set(values)) > 1 or len(rows) == 1]
    constant = [(name, values[0]) for name, values in texts.items() if name not in varying]
    shown = rows[:ROWS_SHOWN]
    body = [
        (str(row.get("cell", "")), str(row.get("block", "")), *(texts[name][i] for name in varying))
        for i, (_, row) in enumerate(shown)
    ]
    lines = tuple(line for line, _ in shown)
    return RawTable(("cell", "block", *varying), lines, tuple(body), tuple(constant), len(rows) - len(shown))


def cell_text(value: Any) -> str:
    """One value, short."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list) and value and all(type(one) in (int, float) for one in value):
        finite = [one for one in value if math.isfinite(one)]
        middle = number(statistics.median(finite)) if finite else "not finite"
        return f"median {middle} of {len(value)}"
    return json.dumps(value, sort_keys=True)


def lines_of(finding: str, rows: Sequence[tuple[int, Row]]) -> list[int]:
    """Lines of the rows that carry a predicate's own name; all of the claim's where none does."""
    named = [line for line, row in rows if finding in row.values()]
    return named or [line for line, _ in rows]


def span(lines: Sequence[int]) -> str:
    """Line numbers in words: 12, 12 to 40."""
    if not lines:
        return "no lines"
    return f"line {lines[0]}" if len(lines) == 1 else f"lines {min(lines)} to {max(lines)}"
