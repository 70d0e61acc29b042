"""LongBench under a configuration: each record's prompt is prefilled densely, then every branch writes its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from artifact.engine.continuation import Prompt, continued
from artifact.measure import configuration as configurations
from artifact.measure.configuration import Configuration
from artifact.measure.workbench import Workbench, prefilled
from artifact.tasks import longbench

Row = dict[str, Any]


def ask(
    bench: Workbench, task: str, folder: Path | None, limit: int | None, arms: Sequence[Configuration]
) -> Iterator[Row]:
    """Yield one row per record and arm: the answer and the task's own metric of it, in [0, 1].

    Records come from `folder`/TASK.jsonl, without a folder from the hub or its cache. UserError where they do not.
    """
    records = longbench.load(task, folder, limit)
    steps = int(longbench.tasks()[task]["tokens"])
    for number, record in enumerate(records):
        tokens = longbench.encode(bench.tokenizer, record, bench.weights.shape.window)
        # One token before the end, so that the branch writes the first token of the answer, too.
        filled = prefilled(bench, tokens[:-1], f"{task}, record {number + 1} of {len(records)}")
        cache = filled.cache.fork(len(tokens) - 1, len(tokens) + steps + 1)
        for arm in arms:
            branch = configurations.bind(arm, bench.weights, bench.calibration, cache, filled.queries, steps + 1)
            asked = Prompt(tokens, cache.share(cache.tokens), branch.packed)
            (given,) = continued(bench.weights, [asked], steps, branch.thresholds)
            ids = until_end(given.generated, bench.tokenizer.eos_token_id)
            text = str(bench.tokenizer.decode(ids, skip_special_tokens=True))
            yield {
                **arm.record(),
                "kind": "longbench",
                "task": task,
                "record": number,
                "prompt_tokens": len(tokens),
                "answer": text,
                "score": longbench.score(record, text),
            }


def until_end(generated: Sequence[int], end: int | None) -> list[int]:
    """The tokens before the first that ends an answer."""
    ids = list(generated)
    return ids[: ids.index(end)] if end in ids else ids
