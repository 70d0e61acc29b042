"""From right and wrong answers to average accuracies and their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from artifact.stats import Interval, paired_difference

Row = Mapping[str, Any]


def arms(rows: Sequence[Row]) -> dict[str, dict[tuple[str, int], float]]:
    """Per label 1.0 or 0.0 for every (task, document). ValueError when arms were not asked the same."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        if row.get("kind") == "choice":
            found.setdefault(row["label"], {})[row["task"], int(row["document"])] = float(row["right"])
    asked = {frozenset(answers) for answers in found.values()}
    if len(asked) > 1:
        raise ValueError("arms were not asked the same questions")
    return found


def by_task(answers: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Accuracy of every task."""
    tasks: dict[str, list[float]] = {}
    for (task, _), right in answers.items():
        tasks.setdefault(task, []).append(right)
    return {task: sum(rights) / len(rights) for task, rights in tasks.items()}


def average(answers: Mapping[tuple[str, int], float]) -> float:
    """Mean over tasks of their accuracies."""
    found = by_task(answers)
    return sum(found.values()) / len(found)


def difference(a: Mapping[tuple[str, int], float], b: Mapping[tuple[str, int], float]) -> Interval:
    """Average accuracy of a minus that of b, questions paired: each weighs as much as makes its task one of equals."""
    questions = list(a)
    counts: dict[str, int] = {}
    for task, _ in questions:
        counts[task] = counts.get(task, 0) + 1
    weights = [len(questions) / (len(counts) * counts[task]) for task, _ in questions]
    return paired_difference(
        [w * a[q] for w, q in zip(weights, questions, strict=True)],
        [w * b[q] for w, q in zip(weights, questions, strict=True)],
    )
