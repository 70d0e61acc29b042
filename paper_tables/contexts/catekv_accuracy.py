"""CateKV beside its baselines: perplexity and kept share of every arm, prompts answered by the three main ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_tables.contexts.kv_windows import perplexity_rows
from paper_tables.render import Figure, Row

CLAIMS = ("catekv_accuracy",)
TESTS = {"passkey": "Passkey", "multikey": "Multi-key", "tracking": "Tracking"}


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per arm. Raises TableMissing when no window was scored."""
    answers = [row for row in rows if row.get("kind") == "answer"]
    tests = [test for test in TESTS if any(row["test"] == test for row in answers)]
    found = perplexity_rows(rows)
    for row in found:
        own = [answer for answer in answers if answer["label"] == row["label"]]
        row["cells"] = [*_list(row["cells"]), *(_answered(own, test) for test in tests)]
    figures = paper["catekv"]["figures"]
    return {
        "text": str(next(row["text"] for row in rows if "text" in row)),
        "tests": [TESTS[test] for test in tests],
        "rows": found,
        "share": Figure(f"{figures['share.128k']['printed']}%", "paper"),
    }


def _list(cells: object) -> list[Figure]:
    return list(cells) if isinstance(cells, list) else []


def _answered(rows: list[Row], test: str) -> Figure | str:
    own = [row for row in rows if row["test"] == test]
    return Figure(f"{sum(row['score'] == 1 for row in own)}/{len(own)}", own[0]["origin"]) if own else "--"
