"""Answers to retrieval prompts under each configuration: prompts of one haystack share its dense prefill, and every
branch decodes from the same cache.

The prefill ends one token before the prompt does, so the branch under test produces the first answer token, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from artifact.engine import teacher
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.kv.retain import budget
from artifact.kv.window import Window
from artifact.measure import configuration as configurations
from artifact.measure.configuration import Branch, Configuration
from artifact.measure.retrieval import Prompt, Writer, answer_tokens, grade
from artifact.measure.workbench import ROWS, Workbench, prefilled

Row = dict[str, Any]
# An answer is some seven digit tokens, whose activations are not those of running text: 44% was read at 50% keep. A
# branch that ran dense, or with another ratio of a sweep's ends, is still farther off than this.
ANSWER_R_P_TOLERANCE = 0.15


def ask(
    bench: Workbench, prompts: Sequence[Prompt], arms: Sequence[Configuration], writer: Writer | None = None
) -> Iterator[Row]:
    """Yield one row per prompt and arm. With `writer`, each multi-key prompt gets a second turn: rows of turn 2.

    Prompts must come grouped by haystack; each group is prefilled once. Raises RuntimeError when a branch did not read
    what it was asked to.
    """
    base: tuple[str, KVCache] | None = None
    room = max(_longest(prompt, writer) for prompt in prompts)
    for number, prompt in enumerate(prompts):
        bench.say(number / len(prompts), f"{prompt.test} at {len(prompt.tokens):,} tokens")
        if base is None or base[0] != prompt.haystack:
            last = base[1] if base else None
            base = (prompt.haystack, _prefill_shared(bench, prompt, last, prompts[number - 1], room))
        cache = base[1]
        queries = _continue_to(bench, cache, prompt.tokens[:-1], prompt.shared - ROWS)
        for arm in arms:
            yield _row(bench, prompt, arm, _answer(bench, prompt, cache, queries, arm), 1, "own")
        if writer is not None and prompt.test == "multikey":
            yield from _second_turn(bench, writer, prompt, cache, queries, arms)


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


def _answer(
    bench: Workbench, prompt: Prompt, cache: KVCache, queries: list[torch.Tensor], arm: Configuration
) -> tuple[list[int], Branch, float]:
    """Generate greedily from the last prompt token; the cache is rolled back afterwards."""
    steps = answer_tokens(prompt)
    branch = configurations.bind(arm, bench.weights, bench.calibration, cache, queries, steps)
    generated, r_p = generate(bench, prompt.tokens, cache, branch, steps)
    configurations.check_r_p(arm, r_p, ANSWER_R_P_TOLERANCE)
    return generated, branch, r_p


def generate(
    bench: Workbench, tokens: torch.Tensor, cache: KVCache, branch: Branch, steps: int
) -> tuple[list[int], float]:
    """Read tokens[cache.tokens:-1] under the branch, then decode `steps` greedy tokens, on the cache's spare slots.

    Every branch of a prompt writes the same slots behind the prompt, which none of them reads before writing; the
    position is restored at the end, so no branch sees another.
    """
    length, start = int(tokens.shape[0]), cache.tokens
    feed = length - 1 - start
    room = min(bench.weights.shape.window, cache.capacity) - length
    steps = max(0, min(steps, room))
    buffer = torch.zeros(length + steps + 1, dtype=torch.int64, device=bench.weights.device)
    buffer[:length] = tokens
    if feed > 0:
        given = tokens[start : start + feed].to(bench.weights.device)
        teacher.extend(bench.weights, cache, given, 0, branch.thresholds, branch.packed)
    r_p = 1.0
    if steps:
        decoder = Decoder(bench.weights, cache, buffer, branch.thresholds, branch.packed, greedy=True)
        decoder.check_room(steps)
        for _ in range(steps):
            decoder.step()
        r_p = decoder.counted().r_p
    cache.set_tokens(start)
    return buffer[length : length + steps].tolist(), r_p


def _second_turn(
    bench: Workbench,
    writer: Writer,
    prompt: Prompt,
    cache: KVCache,
    queries: list[torch.Tensor],
    arms: Sequence[Configuration],
) -> Iterator[Row]:
    """Yield turn 2 of a multi-key prompt: with the selection of the first question, and scored again for the second.

    Of the arms, dense decoding and pure selections take it.
    """
    turn, second = writer.second_turn(prompt)
    steps = answer_tokens(second)
    reserve = len(turn) + steps + 1
    selections = [arm for arm in arms if arm.method == "snapkv" and arm.r_p == 1]
    for arm in [*(arm for arm in arms if arm.kind == "dense"), *selections]:
        branch = configurations.bind(arm, bench.weights, bench.calibration, cache, queries, reserve)
        generated, r_p = generate(bench, second.tokens, cache, branch, steps)
        yield _row(bench, second, arm, (generated, branch, r_p), 2, "stale")
    rescored = _continue_to(bench, cache, second.tokens[:-1], len(prompt.tokens) - ROWS)
    for arm in selections:
        yield _row(bench, second, arm, _answer(bench, second, cache, rescored, arm), 2, "rescored")


def _row(
    bench: Workbench,
    prompt: Prompt,
    arm: Configuration,
    answer: tuple[list[int], Branch, float],
    turn: int,
    selection: str,
) -> Row:
    """A stored answer. selection: "own" question, "stale" (that of turn 1) or "rescored" for the second question."""
    generated, branch, r_p = answer
    prefilled = len(prompt.tokens) - 1
    inside = Window(arm.window.sinks).index(prefilled, arm.r_kv).tolist() if arm.method == "window" else None
    retained = prefilled if branch.packed is None else budget(branch.packed.prompt_tokens, arm.r_kv)
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
        "counted_r_p": r_p,
        "retained": retained,
    }
