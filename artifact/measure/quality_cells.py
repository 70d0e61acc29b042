"""The measuring tasks that quality claims share: windows scored under configurations, and prompts answered by them.

A request names everything that decides a row. Before windows are scored, one configuration that uses every branch of
the request is checked against real decode steps; a difference beyond rounding fails the cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from artifact.measure import answers, quality
from artifact.measure.configuration import Configuration, from_record
from artifact.measure.quality import Protocol
from artifact.measure.quality_plan import families
from artifact.measure.retrieval import Writer, require_fours
from artifact.measure.workbench import Workbench, open_workbench, prefilled
from artifact.profiles import Profile
from artifact.records import Cell, Run

Row = dict[str, Any]
WINDOWS_PER_CELL = 8  # a minute or two lost when interrupted; a process start and its check cost half of that
CHECKED_STEPS, CHECKED_WINDOWS = 8, 3


def profile_params(profile: Profile) -> Row:
    """The part of a request that comes from the profile."""
    return {"model": profile.model, "text": profile.text, "device": profile.device, "dtype": profile.dtype}


def score_windows(run: Run, claim: str, protocol: Protocol, arms: Sequence[Configuration]) -> list[Row]:
    """Rows of every window under every configuration, WINDOWS_PER_CELL windows in a process.

    Whole families of configurations are scored (`quality_plan.families`), so rows of others come along.
    """
    require_distinct(arms)
    wanted = {name: own for name, own in families().items() if any(arm in own for arm in arms)}
    if strangers := [arm for arm in arms if not any(arm in own for own in wanted.values())]:
        wanted["others"] = strangers
    common = profile_params(run.profile)
    common |= {"context": protocol.context_tokens, "scored": protocol.scored_tokens, "windows": protocol.windows}
    cells = []
    for name, own in wanted.items():
        for first in range(0, protocol.windows, WINDOWS_PER_CELL):
            chosen = list(range(first, min(first + WINDOWS_PER_CELL, protocol.windows)))
            params = {**common, "arms": [arm.record() for arm in own], "chosen": chosen}
            task = "artifact.measure.quality_cells:scored"
            cells.append(Cell(claim, f"{name}-{first}", task, params, timeout_s=3600.0))
    return run.measure(cells)


def scored(params: Row) -> Iterator[Row]:
    """Task: score the chosen windows; one row per window and configuration."""
    yield from _with_messages(params, _scored)


def answer_cell(
    run: Run, claim: str, key: str, prompts: Sequence[Row], arms: Sequence[Configuration], tuning: bool = False
) -> Cell:
    """A cell that answers prompts: each entry of `prompts` is {"test", "tokens", "placements", "second_turn"}.

    tuning: take the prompts from the calibration text, with other codes; settings may be chosen on those only.
    """
    require_distinct(arms)
    params = {**profile_params(run.profile), "prompts": list(prompts), "arms": [arm.record() for arm in arms]}
    return Cell(
        claim,
        key,
        "artifact.measure.quality_cells:answered",
        params | {"tuning": tuning},
        timeout_s=3600.0,
    )


def prompts_of(test: str, tokens: int, placements: int, second_turn: bool = False) -> Row:
    """One entry of a request's prompts. Raises UserError for a number of multi-key placements that do not divide."""
    if test == "multikey":
        require_fours(placements)
    return {"test": test, "tokens": tokens, "placements": placements, "second_turn": second_turn}


def answered(params: Row) -> Iterator[Row]:
    """Task: answer the requested prompts under every configuration; one row per prompt, turn and configuration."""
    yield from _with_messages(params, _answered)


def require_distinct(arms: Sequence[Configuration]) -> None:
    """Raise ValueError when two configurations of a request are the same: rows could not be told apart."""
    records = [arm.record() for arm in arms]
    if any(record in records[:i] for i, record in enumerate(records)):
        raise ValueError("two configurations of one request are the same")


def _scored(bench: Workbench, params: Row) -> Iterator[Row]:
    arms = [from_record(record) for record in params["arms"]]
    protocol = Protocol(params["context"], params["scored"], params["windows"])
    text = bench.evaluation_text
    cut = quality.windows(bench.tokenizer, text.text, protocol, text.name)
    quality.check_calibration(bench.calibration, cut, bench.calibration_tokens)
    checked = False
    for number, index in enumerate(params["chosen"]):
        window = cut.tokens[index]
        doing = f"dense prefill of window {index + 1} of {protocol.windows}"
        prompt = prefilled(bench, window[: protocol.context_tokens], doing)
        inputs = (bench.weights, bench.calibration, prompt.cache, prompt.queries, window)
        difference = 0.0
        if number < CHECKED_WINDOWS and not checked:
            steps = min(CHECKED_STEPS, protocol.scored_tokens)
            # The arm with most branches on covers the code of the others.
            busiest = max(arms, key=lambda arm: (arm.r_p < 1) + (arm.method != "full"))
            difference = quality.stepwise_difference(*inputs, busiest, steps)
            # Channels within rounding of a threshold spoil one window in many; a fault of either shows in all.
            checked = difference <= quality.tolerance_nats(bench.weights.dtype, busiest.r_p < 1)
            last = busiest.r_p == 1 or number + 1 == min(CHECKED_WINDOWS, len(params["chosen"]))
            if not checked and last:
                quality.refuse(busiest, difference)
        for arm in arms:
            bench.say((number + 1) / len(params["chosen"]), f"window {index + 1}: {arm.label}")
            yield quality.score(*inputs, arm) | {
                "kind": "window",
                "window": index,
                "protocol": cut.hash,
                "context": protocol.context_tokens,
                "scored": protocol.scored_tokens,
                "bos": cut.bos,
                "text": bench.text_label,
                "calibration": bench.calibration.tokens_hash,
                "stepwise_difference_nats": difference,
            }


def _answered(bench: Workbench, params: Row) -> Iterator[Row]:
    arms = [from_record(record) for record in params["arms"]]
    source = bench.calibration_text if params["tuning"] else bench.evaluation_text
    longest = max(int(entry["tokens"]) for entry in params["prompts"])
    writer = Writer(bench.tokenizer, source, longest, seed=int(bool(params["tuning"])))
    for entry in params["prompts"]:
        make = writer.passkey if entry["test"] == "passkey" else writer.multikey
        prompts = make(int(entry["tokens"]), int(entry["placements"]))
        for row in answers.ask(bench, prompts, arms, writer if entry["second_turn"] else None):
            yield row | {
                "kind": "answer",
                "tuning": bool(params["tuning"]),
                "asked_tokens": entry["tokens"],
                "source": source.sha256[:16],
                "text": bench.text_label,
            }


def _with_messages(params: Row, task: Callable[[Workbench, Row], Iterator[Row]]) -> Iterator[Row]:
    """Run a task; what its inner code says it is doing is handed on before the next row."""
    said: list[Row] = []
    place = (params["model"], params["text"], params["device"], params["dtype"])
    bench = open_workbench(*place, lambda share, doing: said.append({"progress": share, "doing": doing}))
    for row in task(bench, params):
        yield from said[-1:]
        said.clear()
        yield row
