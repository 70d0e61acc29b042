"""From stored rows of the KV claims to intervals: answers kept, perplexity against another arm, counted shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from artifact import stats
from artifact.claim import Finding, Predicate, find, not_run
from artifact.measure import quality
from artifact.profiles import Profile
from artifact.stats import Interval

ONE_SIDED = 0.9  # two ends of 5% each, for regions with one bounded side
Row = Mapping[str, Any]


def answers_of(rows: Sequence[Row], tests: Sequence[str]) -> dict[str, dict[str, Row]]:
    """Rows of answers to the given tests by arm and prompt. ValueError when arms answered different prompts."""
    arms: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.get("kind") != "answer" or row["test"] not in tests:
            continue
        if row["outcome"] == "truncated":
            raise ValueError(f"an answer of {row['label']} was cut off by the model's window")
        own = arms.setdefault(str(row["label"]), {})
        if row["prompt_id"] in own:
            raise ValueError(f"{row['label']} answered prompt {row['prompt_id']} twice")
        own[str(row["prompt_id"])] = row
    if len({frozenset(own) for own in arms.values()}) > 1:
        raise ValueError(f"arms answered different prompts: {', '.join(sorted(arms))}")
    return arms


def share_right(arms: Mapping[str, Mapping[str, Row]], label: str) -> Interval | None:
    """Exact interval of the share of prompts that an arm answers; None without any."""
    own = arms.get(label)
    if not own:
        return None
    return stats.clopper_pearson(sum(row["score"] == 1 for row in own.values()), len(own), ONE_SIDED)


def kept(predicate: Predicate, arms: Mapping[str, Mapping[str, Row]], label: str, profile: Profile) -> Finding:
    """Share of the prompts that dense decoding answers which another arm answers, too."""
    dense, own = arms.get("dense", {}), arms.get(label, {})
    answered = [prompt for prompt, row in dense.items() if row["score"] == 1]
    if not answered or not own:
        return not_run(predicate, "dense decoding answers no prompt of this test, so nothing can be lost")
    hits = sum(own[prompt]["score"] == 1 for prompt in answered)
    extra: dict[str, float | str] = {
        f"{name} answers": f"{sum(row['score'] == 1 for row in rows.values())} of {len(rows)}"
        for name, rows in arms.items()
    }
    extra["kept share"] = mean(float(row["kept_share"]) for row in own.values())
    interval = stats.clopper_pearson(hits, len(answered), ONE_SIDED)
    return find(predicate, interval, profile, f"{hits} of {len(answered)} prompts", extra)


def windows_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of scored windows, one list per protocol (length, tokens and windows) in stored order."""
    scored = [row for row in rows if row.get("kind") == "window"]
    return [[row for row in scored if row["protocol"] == key] for key in dict.fromkeys(r["protocol"] for r in scored)]


def perplexity_ratio(predicate: Predicate, rows: Sequence[Row], label: str, base: str, profile: Profile) -> Finding:
    """Paired perplexity of `label` over that of `base`, with every arm's perplexity and kept share beside it."""
    both = [own for own in windows_of(rows) if {label, base} <= {row["label"] for row in own}]
    if not both:
        return not_run(predicate, f"{label} and {base} were not scored on the same windows in this run")
    scored = both[0]
    found = quality.losses(scored)
    pair = quality.increase(found, label, base)
    interval = Interval(1 + pair.point, 1 + pair.low, 1 + pair.high, pair.n, pair.method, "x")
    extra: dict[str, float | str] = {"dense PPL": quality.perplexity(found, "dense").point}
    for name in (label, base):
        extra[f"PPL {name}"] = quality.perplexity(found, name).point
        extra[f"kept share {name}"] = mean(float(row["kept_share"]) for row in scored if row["label"] == name)
    if any(row["simulated"] for row in scored if row["label"] in (label, base)):
        extra["note"] = "simulated: recovered vectors in a dense cache, no bytes saved"
    return find(predicate, interval, profile, f"n = {pair.n} windows", extra)
