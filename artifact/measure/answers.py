"""Answers to retrieval prompts under each configuration: prompts of one haystack share its dense prefill, and every
branch decodes from the same cache.

The prefill ends one token before the prompt does, so the branch under test produces the first answer token, too. On a
CPU the answers to a few prompts are decoded together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from artifact.engine import continuation, teacher
from artifact.engine.cache import KVCache
from artifact.engine.continuation import Continuation
from artifact.kv.retain import budget
from artifact.kv.window import Window
from artifact.measure import configuration as configurations
from artifact.measure.configuration import Configuration
from artifact.measure.retrieval import Prompt, Writer, answer_tokens, grade
from artifact.measure.workbench import ROWS, Workbench, prefilled

Row = dict[str, Any]
# An answer is some seven digit tokens, whose activations are not those of running text: 44% was read at 50% keep. A
# branch that ran dense, or with another ratio of a sweep's ends, is still farther off than this.
ANSWER_R_P_TOLERANCE = 0.15
TOGETHER = 4  # prompts: as many as ask for the codes of one haystack


@dataclass(frozen=True)
class Asked:
    """A prompt with the dense cache (all but its last token) that arms select from, and the last rows' queries."""

    prompt: Prompt
    cache: KVCache
    queries: list[torch.Tensor]


@dataclass(frozen=True)
class Answer:
    """What an arm generated, and from how many tokens its KV method selected, if it has one."""

    given: Continuation
    selected_from: int | None


def ask(
    bench: Workbench, prompts: Sequence[Prompt], arms: Sequence[Configuration], writer: Writer | None = None
) -> Iterator[Row]:
    """Yield one row per prompt and arm. With `writer`, each multi-key prompt gets a second turn: rows of turn 2.

    Prompts must come grouped by haystack; each group is prefilled once. Raises RuntimeError when a branch did not read
    what it was asked to.
    """
    base: tuple[str, KVCache] | None = None
    room = max(_longest(prompt, writer) for prompt in prompts)
    # A GPU answers one by one: several caches of 128K tokens do not fit beside each other.
    size = TOGETHER if bench.weights.device.type == "cpu" else 1
    for first in range(0, len(prompts), size):
        asked = []
        for number, prompt in enumerate(prompts[first : first + size], first):
            bench.say(number / len(prompts), f"{prompt.test} at {len(prompt.tokens):,} tokens")
            if base is None or base[0] != prompt.haystack:
                last = base[1] if base else None
                base = (prompt.haystack, _prefill_shared(bench, prompt, last, prompts[number - 1], room))
            queries = _continue_to(bench, base[1], prompt.tokens[:-1], prompt.shared - ROWS)
            own = base[1] if size == 1 else base[1].fork(base[1].tokens, room)
            asked.append(Asked(prompt, own, queries))
        steps = max(answer_tokens(one.prompt) for one in asked)
        given = _answers(bench, asked, arms, steps)
        for i, one in enumerate(asked):
            for arm in arms:
                yield _row(bench, one.prompt, arm, given[i, arm.label], 1, "own")
        if writer is not None and asked[0].prompt.test == "multikey":
            yield from _second_turn(bench, writer, asked, arms)


def _longest(prompt: Prompt, writer: Writer | None) -> int:
    """Cache entries that a prompt needs with its answer and, where there is one, its second turn."""
    second = writer is not None and prompt.test == "multikey"
    last = writer.second_turn(prompt)[1] if writer is not None and second else prompt
    return len(last.tokens) + answer_tokens(last) + 1


def _prefill_shared(bench: Workbench, prompt: Prompt, last: KVCache | None, before: Prompt, room: int) -> KVCache:
    """A cache of the prompt's shared prefix; what it has in common with the prompt before is not computed again.

    On a GPU it is: one fused prefill is faster there than passes over the rest.
    """
    tokens = prompt.tokens[: prompt.shared]
    if last is not None and bench.weights.device.type == "cpu":
        length = min(prompt.shared, before.shared)
        differ = (prompt.tokens[:length] != before.tokens[:length]).nonzero()
        common = int(differ[0]) if len(differ) else length
        if common >= ROWS:
            last.set_tokens(min(common, last.tokens))
            teacher.extend(bench.weights, last, tokens[last.tokens :])
            return last
    doing = f"dense prefill of {prompt.shared:,} tokens ({prompt.test})"
    return prefilled(bench, prompt.tokens[: prompt.shared], doing).cache.fork(prompt.shared, room)


def _continue_to(bench: Workbench, cache: KVCache, tokens: torch.Tensor, keep: int) -> list[torch.Tensor]:
    """Roll the cache back to `keep` tokens and extend it to `tokens`; return the last rows' queries."""
    cache.set_tokens(max(1, keep))
    rest = tokens[cache.tokens :].to(bench.weights.device)
    return teacher.extend(bench.weights, cache, rest, ROWS).queries


def _answers(
    bench: Workbench,
    asked: Sequence[Asked],
    arms: Sequence[Configuration],
    steps: int,
    onward: Callable[[Prompt], tuple[int, Prompt]] = lambda prompt: (0, prompt),
) -> dict[tuple[int, str], Answer]:
    """Greedy answers by number of the prompt and label of the arm, each selected from its prompt's cache.

    onward: the prompt that an arm answers instead, and how many tokens it reads first on what it retained.
    """
    found: dict[tuple[int, str], Answer] = {}
    goals = [onward(one.prompt) for one in asked]
    kinds = {(arm.r_p, arm.method == "full"): None for arm in arms}
    for kind in kinds:
        same = [arm for arm in arms if (arm.r_p, arm.method == "full") == kind]
        keys, branches, jobs = [], [], []
        for i, (one, (more, goal)) in enumerate(zip(asked, goals, strict=True)):
            for arm in same:
                branch = configurations.bind(
                    arm, bench.weights, bench.calibration, one.cache, one.queries, steps + more
                )
                jobs.append(continuation.Prompt(goal.tokens, one.cache.share(one.cache.tokens), branch.packed))
                keys.append((i, arm))
                branches.append(branch)
        given = continuation.continued(bench.weights, jobs, steps, branches[0].thresholds)
        for (i, arm), branch, own in zip(keys, branches, given, strict=True):
            if own.generated:
                configurations.check_r_p(arm, own.r_p, ANSWER_R_P_TOLERANCE)
            found[i, arm.label] = Answer(own, None if branch.packed is None else branch.packed.prompt_tokens)
    return found


def _second_turn(
    bench: Workbench, writer: Writer, asked: Sequence[Asked], arms: Sequence[Configuration]
) -> Iterator[Row]:
    """Yield turn 2 of multi-key prompts: with the selection of the first question, and scored again for the second.

    Of the arms, dense decoding and pure selections take it.
    """
    seconds = [writer.second_turn(one.prompt) for one in asked]
    steps = max(answer_tokens(second) for _, second in seconds)
    goals = {one.prompt.id: (len(turn) + 1, second) for one, (turn, second) in zip(asked, seconds, strict=True)}
    selections = [arm for arm in arms if arm.method == "snapkv" and arm.r_p == 1]
    held = [*(arm for arm in arms if arm.kind == "dense"), *selections]
    stale = _answers(bench, asked, held, steps, lambda prompt: goals[prompt.id])
    again = []
    for one, (_, second) in zip(asked, seconds, strict=True):
        rescored = _continue_to(bench, one.cache, second.tokens[:-1], len(one.prompt.tokens) - ROWS)
        again.append(Asked(second, one.cache, rescored))
    fresh = _answers(bench, again, selections, steps)
    for i, (_, second) in enumerate(seconds):
        for arm in held:
            yield _row(bench, second, arm, stale[i, arm.label], 2, "stale")
        for arm in selections:
            yield _row(bench, second, arm, fresh[i, arm.label], 2, "rescored")


def _row(
    bench: Workbench,
    prompt: Prompt,
    arm: Configuration,
    answer: Answer,
    turn: int,
    selection: str,
) -> Row:
    """A stored answer. selection: "own" question, "stale" (that of turn 1) or "rescored" for the second question."""
    generated = answer.given.generated[: answer_tokens(prompt)]
    prefilled = len(prompt.tokens) - 1
    inside = Window(arm.window.sinks).index(prefilled, arm.r_kv).tolist() if arm.method == "window" else None
    retained = prefilled if answer.selected_from is None else budget(answer.selected_from, arm.r_kv)
    return {
        **arm.record(),
        "test": prompt.test,
        "turn": turn,
        "selection": selection,
        "prompt_tokens": len(prompt.tokens),
        "prompt_id": prompt.id,
        "depth": round(prompt.depth, 4),
        "needle_start": prompt.needle.start,
        "in_window": None if inside is None else set(range(prompt.needle.start, prompt.needle.stop)) <= set(inside),
        "outcome": grade(prompt, generated, bench.tokenizer),
        "generated": generated,
        "counted_r_p": answer.given.r_p,
        "retained": retained,
    }
