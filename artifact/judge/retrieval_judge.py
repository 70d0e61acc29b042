"""From stored answers to findings: what each arm answered, where, and how often two arms agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from artifact import stats
from artifact.claim import Claim, Finding, Predicate, find, not_run
from artifact.measure import quality
from artifact.profiles import Profile
from artifact.stats import Interval, exact_interval

ONE_SIDED = 0.9  # two ends of 5% each
Row = Mapping[str, Any]
Arm = dict[tuple[str, int], Row]  # (prompt id, turn) -> row


class Judgement:
    """Rows of one run, checked once; each method answers one predicate of `claim`.

    Raises ValueError when arms answered different prompts, when an answer was truncated, or when the setting's tuning
    prompts came from the text that is evaluated: such rows compare nothing.
    """

    def __init__(self, rows: Sequence[Row], profile: Profile, claim: Claim) -> None:
        self.profile = profile
        self.predicates = {predicate.name: predicate for predicate in claim.predicates}
        answers = [row for row in rows if row.get("kind") == "answer"]
        if cut := [row["prompt_id"] for row in answers if row["outcome"] == "truncated"]:
            raise ValueError(f"{len(cut)} answers were cut off by the model's window, the first at prompt {cut[0]}")
        self.tuning = [row for row in answers if row["tuning"]]
        shipped = [row for row in answers if not row["tuning"]]
        check_disjoint(self.tuning, shipped)
        self.first = by_arm(row for row in shipped if row["turn"] == 1)
        self.second = [row for row in shipped if row["turn"] == 2]
        self.windows = [row for row in rows if row.get("kind") == "window"]

    def answers(self, name: str, arm: str) -> Finding:
        """Share of placements that one arm answers."""
        outcomes = [right(row) for row in self.first.get(arm, {}).values()]
        return self._share(name, outcomes, self._outcomes(arm))

    def outside(self, name: str, arm: str) -> Finding:
        """Number of placements outside the window's region that it answers; needs at least one of them."""
        rows = [row for row in self.first.get(arm, {}).values() if row["in_window"] is False]
        if not rows:
            return not_run(self.predicates[name], "no placement lies outside the window's region")
        count = sum(right(row) for row in rows)
        inside = [row for row in self.first[arm].values() if row["in_window"]]
        extra = {**self._outcomes(arm), "outside": len(rows), "inside": len(inside)}
        extra["inside answered"] = sum(right(row) for row in inside)
        return self._find(name, replace(exact_interval(count, "placements"), n=len(rows)), "counted", extra)

    def distractors(self, name: str, arm: str) -> Finding:
        """Number of multi-key placements at which an arm returns another code."""
        rows = [row for row in self.first.get(arm, {}).values() if row["test"] == "multikey"]
        if not rows:
            return not_run(self.predicates[name], "no multi-key placement was answered")
        count = sum(row["outcome"] == "distractor" for row in rows)
        lengths = Counter(f"distractors at {row['asked_tokens']}" for row in rows if row["outcome"] == "distractor")
        return self._find(name, replace(exact_interval(count, "placements"), n=len(rows)), "counted", dict(lengths))

    def kept(self, name: str, arm: str, base: str) -> Finding:
        """Share of the placements that `base` answers which `arm` answers, too."""
        pairs = self._pairs(arm, base)
        kept = [right(a) for a, b in pairs if right(b)]
        alike = sum(a["outcome"] == b["outcome"] for a, b in pairs)
        extra: dict[str, float | str] = {f"{base} answers": len(kept)}
        extra |= {f"same outcome as {base}": f"{alike} of {len(pairs)}"}
        return self._share(name, kept, {**self._outcomes(arm), **extra})

    def second_turn(self, name: str, arm: str, selection: str) -> Finding:
        """Share of second turns at which an arm with a stale or rescored selection agrees with dense decoding."""
        dense = {row["prompt_id"]: row for row in self.second if row["label"] == "dense"}
        own = {row["prompt_id"]: row for row in self.second if (row["label"], row["selection"]) == (arm, selection)}
        stats.require_equal_arms({"dense": list(dense), selection: list(own)})
        same = [right(own[prompt]) == right(row) for prompt, row in dense.items()]
        extra = {"answered": sum(map(right, own.values())), "dense answered": sum(map(right, dense.values()))}
        return self._share(name, same, extra)

    def perplexity(self, name: str, window: str, selection: str) -> Finding:
        """Upper end of the paired interval of the window's perplexity over the selection's."""
        if not self.windows:
            return not_run(self.predicates[name], "no window was scored")
        found = quality.losses(self.windows)
        pair = quality.increase(found, window, selection)
        judged = Interval(pair.high, pair.high, pair.high, pair.n, "upper end of a paired bootstrap 95%", pair.unit)
        extra: dict[str, float | str] = {"window over selection": pair.point, "low": pair.low, "high": pair.high}
        extra |= {f"PPL {label}": quality.perplexity(found, label).point for label in ("dense", window, selection)}
        return self._find(name, judged, f"n = {pair.n} windows", extra)

    def sensitivity(self, name: str, r_kv: float) -> Finding:
        """Right answers of every variant on the tuning prompts; the judged number is the spread at one keep ratio."""
        if not self.tuning:
            return not_run(self.predicates[name], "no tuning prompt was answered")
        totals: dict[str, int] = {}
        at_keep: dict[str, int] = {}
        for row in self.tuning:
            label = variant(row)
            totals[label] = totals.get(label, 0) + right(row)
            if row["r_kv"] == r_kv:
                at_keep[label] = totals[label]
        prompts = len({row["prompt_id"] for row in self.tuning})
        spread = max(at_keep.values()) - min(at_keep.values())
        extra = {label: f"{count} of {prompts}" for label, count in totals.items()}
        return self._find(name, replace(exact_interval(spread, "placements"), n=prompts), "tuning prompts", extra)

    def _pairs(self, arm: str, base: str) -> list[tuple[Row, Row]]:
        a, b = self.first.get(arm, {}), self.first.get(base, {})
        if set(a) != set(b):
            raise ValueError(f"{arm} and {base} answered different prompts: {len(a)} and {len(b)}")
        return [(a[key], b[key]) for key in sorted(a)]

    def _outcomes(self, arm: str) -> dict[str, float | str]:
        counts = Counter(row["outcome"] for row in self.first.get(arm, {}).values())
        return {outcome: counts[outcome] for outcome in ("right", "distractor", "wrong")}

    def _share(self, name: str, hits: Sequence[bool], extra: Mapping[str, float | str]) -> Finding:
        """An exact (Clopper-Pearson) interval of a share, its n in the note.

        Regions of shares have one bounded side, so each end of the interval is an exact test at 5%.
        """
        if not hits:
            return not_run(self.predicates[name], "no placement to judge it by")
        interval = stats.clopper_pearson(sum(hits), len(hits), ONE_SIDED)
        return self._find(name, interval, f"{sum(hits)} of {len(hits)} placements", extra)

    def _find(self, name: str, interval: Interval, note: str, extra: Mapping[str, Any]) -> Finding:
        predicate: Predicate = self.predicates[name]
        return find(predicate, interval, self.profile, note, extra)


def right(row: Row) -> bool:
    """Whether the code asked for was returned; a distractor is not."""
    return bool(row["outcome"] == "right")


def by_arm(rows: Iterable[Row]) -> dict[str, Arm]:
    """Rows by label and (prompt, turn). ValueError when arms have different prompts or one answered a prompt twice."""
    arms: dict[str, Arm] = {}
    for row in rows:
        key = (str(row["prompt_id"]), int(row["turn"]))
        if key in arms.setdefault(str(row["label"]), {}):
            raise ValueError(f"{row['label']} answered prompt {row['prompt_id']} twice")
        arms[str(row["label"])][key] = row
    stats.require_equal_arms({label: list(arm) for label, arm in arms.items()})
    keys = {label: frozenset(arm) for label, arm in arms.items()}
    if len(set(keys.values())) > 1:
        raise ValueError(f"arms answered different prompts: {', '.join(sorted(keys))}")
    return arms


def check_disjoint(tuning: Sequence[Row], shipped: Sequence[Row]) -> None:
    """ValueError when settings were chosen on the text or the prompts that are evaluated."""
    if {row["source"] for row in tuning} & {row["source"] for row in shipped}:
        raise ValueError("the selection was tuned on the text that the prompts are made of")
    if {row["prompt_id"] for row in tuning} & {row["prompt_id"] for row in shipped}:
        raise ValueError("the selection was tuned on prompts that are evaluated")


def variant(row: Row) -> str:
    """Name of a selection with its parameters."""
    kv = row["kv"]
    return f"keep {row['r_kv']:.0%}, {kv['pool']} {kv['width']}, {kv['rows']} rows, group {kv['aggregate']}"
