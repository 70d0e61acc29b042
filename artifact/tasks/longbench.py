"""LongBench: its records, prompts and metrics for the 16 English and code tasks.

Records come from a folder of its JSON lines (`NAME.jsonl`), or through `datasets` where the hub answers or the data set
lies in its cache. A prompt longer than the model's window is cut in the middle, as the benchmark does. Its five Chinese
tasks need a word segmenter and are left out. Metrics are written from their published definitions: token F1 after
normalisation, ROUGE-L F1, matching of numbers and classes, edit similarity of the first line of code.
"""

from __future__ import annotations

import difflib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from artifact.engine import prompts
from artifact.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_NAME = "THUDM/LongBench"
FIELDS = ("input", "context", "answers", "all_classes")


@dataclass(frozen=True)
class Record:
    """One example: question and context, every accepted answer, and the class names of a classification task."""

    task: str
    input: str
    context: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


@cache
def tasks() -> Mapping[str, Mapping[str, Any]]:
    """Prompt, metric and answer length of every task by name."""
    found: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["tasks"]
    return found


def load(task: str, folder: Path | None = None, limit: int | None = None) -> list[Record]:
    """Return the records of a task from `folder`/TASK.jsonl, or from the hub or its cache without a folder.

    Raises UserError for an unknown task, a missing file, a broken line or a hub that does not answer.
    """
    if task not in tasks():
        raise UserError(f"no LongBench task is called {task!r}; there are {', '.join(tasks())}")
    rows = _from_hub(task) if folder is None else _from_file(folder / f"{task}.jsonl")
    return [_record(task, number, row) for number, row in enumerate(rows[:limit])]


def _from_file(file: Path) -> list[Any]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file.name} cannot be read ({type(error).__name__}); give LongBench's data folder") from None
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        raise UserError(f"{file.name} is not JSON lines; fetch LongBench's data again") from None


def _from_hub(task: str) -> list[Any]:
    from datasets import load_dataset

    try:
        return list(load_dataset(HUB_NAME, task, split="test"))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UserError(
            f"LongBench's {task} is neither cached nor reachable ({reason}); give a folder with {task}.jsonl"
        ) from None


def _record(task: str, number: int, row: Any) -> Record:
    if not isinstance(row, dict) or any(field not in row for field in FIELDS):
        raise UserError(f"record {number} of {task} lacks one of {', '.join(FIELDS)}; fetch LongBench's data again")
    answers, classes = row["answers"], row["all_classes"] or ()
    if not isinstance(answers, Sequence) or isinstance(answers, str) or not answers:
        raise UserError(f"record {number} of {task} has no list of answers; fetch LongBench's data again")
    return Record(task, str(row["input"]), str(row["context"]), tuple(map(str, answers)), tuple(map(str, classes)))


def encode(tokenizer: PreTrainedTokenizerBase, record: Record, window: int) -> torch.Tensor:
    """Return the prompt (n,) int64, cut in the middle so that it and its answer fit a window of `window` tokens."""
    spec = tasks()[record.task]
    filled = str(spec["prompt"]).replace("{input}", record.input).replace("{context}", record.context)
    ids = prompts.encode(tokenizer, filled)
    room = window - int(spec["tokens"])
    if room < 2:
        raise UserError(f"a window of {window} tokens has no room for an answer of {spec['tokens']} to {record.task}")
    if len(ids) <= room:
        return ids
    return torch.cat((ids[: room // 2], ids[len(ids) - (room - room // 2) :]))


def score(record: Record, answer: str) -> float:
    """Return the task's metric of an answer, in [0, 1]: the best over the accepted answers."""
    spec = tasks()[record.task]
    if spec.get("first_line"):
        answer = answer.lstrip("\n").split("\n")[0]
    metric = METRICS[spec["metric"]]
    return max(metric(answer, truth, record.classes) for truth in record.answers)


def normalised(text: str) -> list[str]:
    """Words in lower case without punctuation and articles."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def f1(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Harmonic mean of precision and recall over normalised words."""
    found, expected = normalised(answer), normalised(truth)
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected)) if common else 0.0


def rouge_l(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """F1 of the longest common subsequence of words."""
    found, expected = answer.split(), truth.split()
    line = [0] * (len(expected) + 1)
    for word in found:
        before = 0
        for j, other in enumerate(expected, 1):
            before, line[j] = line[j], before + 1 if word == other else max(line[j], line[j - 1])
    return 2 * line[-1] / (len(found) + len(expected)) if line[-1] else 0.0


def numbers(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the one asked for."""
    wanted = re.findall(r"\d+", truth)[:1]
    found = re.findall(r"\d+", answer)
    return sum([number] == wanted for number in found) / len(found) if found else 0.0


def classification(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """One over the number of class names in the answer if the right one is among them; a name that is part of the
    right one does not count.
    """
    named = [name for name in classes if name in answer and (name == truth or name not in truth)]
    return 1 / len(named) if truth in named else 0.0


def code(answer: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Edit similarity of the first line that is neither comment nor fence, rounded to percent."""
    lines = [line for line in answer.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//"))]
    return round(100 * difflib.SequenceMatcher(None, lines[0] if lines else "", truth).ratio()) / 100


METRICS: Mapping[str, Callable[[str, str, Sequence[str]], float]] = {
    "f1": f1, "rouge": rouge_l, "count": numbers, "retrieval": numbers, "classification": classification, "code": code,
}  # fmt: skip
