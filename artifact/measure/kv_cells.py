"""The measuring tasks of the KV claims: head types from a reference set, windows scored and prompts answered under
named arms, all of an arm's answers from real decode steps on the arm's own storage.

Prompts are prefilled densely, one token short of their end; the full cache is released before an arm decodes, so that
nothing but what the method kept can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from artifact.engine import continuation, teacher
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.pruned import PrunedCache
from artifact.kv.catekv import CateKV
from artifact.measure import kv_arms, quality
from artifact.measure.answers import TOGETHER
from artifact.measure.kv_arms import Arm
from artifact.measure.quality import Protocol
from artifact.measure.retrieval import Prompt, Writer, answer_tokens, grade
from artifact.measure.workbench import ROWS, Prefilled, Workbench, open_workbench, prefilled
from artifact.projection.teal import hash_tokens
from artifact.tasks import variable_tracking
from artifact.tasks.variable_tracking import Tracking

Row = dict[str, Any]


def identify(params: Row) -> Iterator[Row]:
    """Task: coefficients of variation of every head on each reference prompt; one row per prompt.

    The reference set is variable tracking on the calibration text: other text, names and values than any test prompt.
    """
    bench = _bench(params)
    writer = Writer(bench.tokenizer, bench.calibration_text, int(params["tokens"]), seed=1)
    tracked = variable_tracking.prompts(writer, int(params["tokens"]), int(params["samples"]), tag="reference")
    method = CateKV(**params["catekv"])
    for number, prompt in enumerate(tracked):
        yield {"progress": number / len(tracked), "doing": f"reference prompt {number + 1} of {len(tracked)}"}
        filled = prefilled(bench, prompt.tokens, "dense prefill of a reference prompt")
        found = method.scores(filled.cache, filled.queries, _scale(bench))
        yield {
            "kind": "heads",
            "prompt_id": prompt.id,
            "source": bench.calibration_text.sha256[:16],
            "variations": found.tolist(),
        }


def scored(params: Row) -> Iterator[Row]:
    """Task: negative log-likelihoods of the windows under every arm; one row per window and arm.

    params["first"], where given: [windows, scored tokens] to take of them.
    """
    bench = _bench(params)
    protocol = Protocol(params["context"], params["scored"], params["windows"])
    text = bench.evaluation_text
    cut = quality.windows(bench.tokenizer, text.text, protocol, text.name)
    if "first" in params:
        cut = cut.first(*params["first"])
    arms = [kv_arms.from_record(record) for record in params["arms"]]
    for number, window in enumerate(cut.tokens):
        yield {"progress": number / len(cut.tokens), "doing": f"window {number + 1} of {len(cut.tokens)}"}
        prompt = prefilled(bench, window[: protocol.context_tokens], f"dense prefill of window {number + 1}")
        for arm in arms:
            nll, share = _score(bench, prompt, window, arm)
            yield {
                "kind": "window",
                "label": arm.label,
                "method": arm.method,
                "window": number,
                "protocol": cut.hash,
                "window_tokens_hash": hash_tokens(window),
                "nll": nll,
                "kept_share": share,
                "simulated": arm.simulated,
                "text": bench.text_label,
            }


def _score(bench: Workbench, prompt: Prefilled, window: torch.Tensor, arm: Arm) -> tuple[list[float], float]:
    """nll in nats of the tokens after the prefill, and the share of the cache that the arm keeps."""
    context = prompt.cache.tokens
    inputs, targets = window[context:-1], window[context + 1 :].to(bench.weights.device)
    branch = kv_arms.bind(arm, prompt.cache, prompt.queries, _scale(bench), len(inputs))
    share = kv_arms.kept_share(branch, prompt.cache)
    if branch is None or not branch.per_step:
        block = teacher.forward(bench.weights, prompt.cache, inputs, None, branch)
        return teacher.token_nll(bench.weights, block.hidden, targets).tolist(), share
    decoder = Decoder(bench.weights, prompt.cache.released(), window.to(bench.weights.device), packed=branch)
    found = []
    for target in targets:
        decoder.step()
        found.append(float(functional.cross_entropy(decoder.logits.double(), target)))
    return found, share


def answered(params: Row) -> Iterator[Row]:
    """Task: needle and variable-tracking prompts answered under every arm; one row per prompt and arm.

    params["needles"]: {"test", "tokens", "placements"} each; params["tracking"]: {"tokens", "count", "hops", "chains",
    "ask"} each.
    """
    bench = _bench(params)
    arms = [kv_arms.from_record(record) for record in params["arms"]]
    sets = [*params["needles"], *params["tracking"]]
    longest = max(int(one["tokens"]) for one in sets)
    writer = Writer(bench.tokenizer, bench.evaluation_text, longest)
    for one in params["needles"]:
        make = writer.passkey if one["test"] == "passkey" else writer.multikey
        yield from _needles(bench, make(int(one["tokens"]), int(one["placements"])), arms)
    for one in params["tracking"]:
        options = {name: one[name] for name in ("hops", "chains", "ask")}
        tracked = variable_tracking.prompts(writer, int(one["tokens"]), int(one["count"]), **options)
        yield from _tracked(bench, tracked, arms)


def _needles(bench: Workbench, prompts: Sequence[Prompt], arms: Sequence[Arm]) -> Iterator[Row]:
    cache: KVCache | None = None
    haystack = ""
    for first in range(0, len(prompts), TOGETHER):
        asked = []
        for number, prompt in enumerate(prompts[first : first + TOGETHER], first):
            yield {"progress": number / len(prompts), "doing": f"{prompt.test} at {len(prompt.tokens):,} tokens"}
            if cache is None or prompt.haystack != haystack:
                shared = prefilled(bench, prompt.tokens[: prompt.shared], f"dense prefill of {prompt.shared:,} tokens")
                cache, haystack = shared.cache.fork(prompt.shared, prompt.shared + ROWS + 64), prompt.haystack
            asked.append(_asked(bench, cache, prompt.shared, prompt.tokens))
        steps = max(answer_tokens(prompt) for prompt in prompts)
        for arm in arms:
            for prompt, (generated, share) in zip(prompts[first:], _answers(bench, asked, steps, arm), strict=False):
                outcome = grade(prompt, generated[: answer_tokens(prompt)], bench.tokenizer)
                yield {
                    **_common(bench, arm, prompt.test, prompt.tokens, share),
                    "prompt_id": prompt.id,
                    "depth": round(prompt.depth, 4),
                    "outcome": outcome,
                    "score": float(outcome == "right"),
                }


def _tracked(bench: Workbench, prompts: Sequence[Tracking], arms: Sequence[Arm]) -> Iterator[Row]:
    for number, prompt in enumerate(prompts):
        count = len(prompt.tokens)
        yield {"progress": number / len(prompts), "doing": f"variable tracking at {count:,} tokens"}
        filled = prefilled(bench, prompt.tokens[: count - ROWS], "dense prefill of a tracking prompt")
        asked = _asked(bench, filled.cache.fork(count - ROWS, count), count - ROWS, prompt.tokens)
        for arm in arms:
            ((generated, share),) = _answers(bench, [asked], prompt.answer_tokens, arm)
            answer = str(bench.tokenizer.decode(generated))
            yield {
                **_common(bench, arm, "tracking", prompt.tokens, share),
                "prompt_id": prompt.id,
                "depth": 0.0,
                "outcome": "right" if prompt.score(answer) == 1 else "wrong",
                "score": prompt.score(answer),
            }


def _common(bench: Workbench, arm: Arm, test: str, tokens: torch.Tensor, share: float) -> Row:
    return {
        "kind": "answer",
        "label": arm.label,
        "method": arm.method,
        "test": test,
        "prompt_tokens": len(tokens),
        "kept_share": share,
        "simulated": arm.simulated,
        "source": bench.evaluation_text.sha256[:16],
        "text": bench.text_label,
    }


@dataclass(frozen=True)
class Asked:
    """A prompt, the dense cache of all but its last token, and the queries of its last rows."""

    tokens: torch.Tensor
    cache: KVCache
    queries: list[torch.Tensor]


def _asked(bench: Workbench, cache: KVCache, shared: int, tokens: torch.Tensor) -> Asked:
    """Extend `cache`, which holds tokens[:shared], to all but the last token, and copy it."""
    count = int(tokens.shape[0])
    cache.set_tokens(max(1, min(shared, count - 1 - ROWS)))
    rest = tokens[cache.tokens : count - 1].to(bench.weights.device)
    queries = teacher.extend(bench.weights, cache, rest, ROWS).queries
    return Asked(tokens, cache.fork(count - 1, count - 1), queries)


def _answers(bench: Workbench, asked: Sequence[Asked], steps: int, arm: Arm) -> list[tuple[list[int], float]]:
    """Greedy answers of an arm and the share of the cache it keeps: dense on a fork, a method on its own storage
    alone.
    """
    prompts, shares = [], []
    for one in asked:
        branch = kv_arms.bind(arm, one.cache, one.queries, _scale(bench), steps)
        shares.append(kv_arms.kept_share(branch, one.cache))
        count = one.cache.tokens
        own = one.cache.fork(count, count + 1 + steps) if branch is None else one.cache.released()
        prompts.append(continuation.Prompt(one.tokens, own, branch))
    given = continuation.continued(bench.weights, prompts, steps, None)
    return [(own.generated, share) for own, share in zip(given, shares, strict=True)]


def _bench(params: Row) -> Workbench:
    return open_workbench(params["model"], params["text"], params["device"], params["dtype"])


def _scale(bench: Workbench) -> float:
    return float(bench.weights.shape.head_dim**-0.5)


def stored(params: Row) -> Iterator[Row]:
    """Task: what each arm stores of one real prompt, counted from its tensors; one row per arm."""
    bench = _bench(params)
    count = int(params["context"])
    text = bench.evaluation_text
    cut = quality.windows(bench.tokenizer, text.text, Protocol(count, 1, 1), text.name)
    prompt = prefilled(bench, cut.tokens[0][:count], f"dense prefill of {count:,} tokens")
    for record in params["arms"]:
        arm = kv_arms.from_record(record)
        branch = kv_arms.bind(arm, prompt.cache, prompt.queries, _scale(bench), 0)
        row = {"kind": "stored", "label": arm.label, "method": arm.method, "prompt_tokens": count}
        yield row | {
            "kept_share": kv_arms.kept_share(branch, prompt.cache),
            "key_bytes": branch.key_bytes() if isinstance(branch, PrunedCache) else None,
            "sector_bytes": branch.sector_bytes() if isinstance(branch, PrunedCache) else None,
            "packed_bytes": branch.fixed_bytes if isinstance(branch, PrunedCache) else None,
            "text": bench.text_label,
        }
