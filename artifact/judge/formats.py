"""Windows that the same arms scored with weights in several formats: losses by format, and what the format changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from artifact.measure import quality
from artifact.measure.masked_plan import FORMATS
from artifact.stats import Interval

KINDS = ("window", "format")  # in the profile's own format, and in another


def by_format(rows: Iterable[dict[str, Any]]) -> dict[str, quality.Losses]:
    """Losses by format of the arms that were scored in more than one. ValueError when windows were lost from an arm."""
    scored = [row for row in rows if row.get("kind") in KINDS and "dtype" in row]
    compared = {row["label"] for row in scored if row["kind"] == KINDS[1]}
    names = dict.fromkeys(str(row["dtype"]) for row in scored)
    return {
        name: quality.losses([row for row in scored if row["label"] in compared and row["dtype"] == name])
        for name in names
    }


def changes(losses: dict[str, quality.Losses]) -> dict[str, Interval]:
    """Per arm, perplexity in bfloat16 over that in float32 minus 1, windows paired; both must have been scored."""
    wide, narrow = (losses[name] for name in FORMATS)
    return {one: quality.increase({"wide": wide[one], "narrow": narrow[one]}, "narrow", "wide") for one in wide}
