"""SparK's variants and ThinK: perplexity and kept share, beside the paper's LongBench averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_tables.contexts.kv_windows import perplexity_rows
from paper_tables.render import Figure, Row

CLAIMS = ("spark_quality",)
PRINTED = {
    "dense": "full", "snapkv30": "snapkv", "snapkv30+spark50": "spark.50", "snapkv30+spark80": "spark.80",
    "snapkv30+think50": "think.50",
}  # fmt: skip


def context(rows: list[Row], results: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, Any]:
    """One row per variant. Raises TableMissing when no window was scored."""
    figures = paper["spark"]["figures"]
    found = perplexity_rows(rows)
    for row in found:
        key = PRINTED.get(str(row["label"]))
        row["printed"] = "--" if key is None else Figure(figures[f"longbench.{key}"]["printed"], "paper")
    return {"text": str(next(row["text"] for row in rows if "text" in row)), "rows": found}
