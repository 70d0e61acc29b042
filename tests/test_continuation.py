"""Several prompts continued together generate what each generates alone, from real decode steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from models_fixture import saved

from artifact.engine import continuation, models
from artifact.engine.cache import KVCache
from artifact.engine.continuation import Prompt, continued
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prefill import prefill
from artifact.kv.branch import KVBranch
from artifact.kv.catekv import CateKV, identify
from artifact.kv.quest import Quest
from artifact.kv.snapkv import SnapKV
from artifact.projection import teal
from artifact.projection.thresholds import Thresholds

STEPS = 6
LENGTHS = (40, 57, 57, 33)
ROWS = 16
Filled = tuple[torch.Tensor, KVCache, list[torch.Tensor]]  # tokens, dense cache, queries of its last rows


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    _, path = saved("llama", tmp_path_factory.mktemp("models"))
    return models.load(str(path))


def filled(weights: Weights, lengths: Sequence[int], unread: int) -> list[Filled]:
    """Prompts of these lengths, prefilled up to their last `unread` tokens."""
    found = []
    for number, count in enumerate(lengths):
        tokens = torch.randint(weights.shape.vocab, (count,), generator=torch.Generator().manual_seed(number))
        made = prefill(weights, tokens[:-unread], None, (count - unread,), ROWS)
        found.append((tokens, made.cache, made.queries[count - unread]))
    return found


def branch_of(method: str, weights: Weights, cache: KVCache, queries: list[torch.Tensor]) -> KVBranch | None:
    scale, reserve = 1 / math.sqrt(weights.shape.head_dim), STEPS + 3
    if method == "snapkv":
        return SnapKV(rows=8, width=5).select(cache, queries, 0.4, scale, reserve)
    if method == "quest":
        return Quest(keep=0.5, page_tokens=4).select(cache, reserve)
    if method == "catekv":
        own = CateKV(rows=ROWS, sinks=2, recent=8, critical=6)
        adaptive = identify(own.scores(cache, queries, scale)[None], 0.5)
        return own.select(cache, queries, adaptive, scale, reserve)
    return None


def alone(weights: Weights, one: Filled, method: str, thresholds: Thresholds | None) -> tuple[list[int], float]:
    """The same by decode steps of one sequence, the rest of the prompt included; with the r_p of the answer."""
    tokens, cache, queries = one
    own = cache.fork(cache.tokens, len(tokens) + STEPS)
    buffer = torch.cat((tokens, torch.zeros(STEPS, dtype=torch.int64)))
    branch = branch_of(method, weights, own, queries)
    given = Decoder(weights, own, buffer, thresholds, branch)
    for _ in range(len(tokens) - 1 - cache.tokens):
        given.step()
    decoder = Decoder(weights, own, buffer, thresholds, branch, greedy=True)
    for _ in range(STEPS):
        decoder.step()
    return buffer[len(tokens) :].tolist(), decoder.counted().r_p


@pytest.mark.parametrize(("method", "keep"), [("full", 1.0), ("full", 0.5), ("snapkv", 1.0), ("snapkv", 0.5)])
def test_together_is_what_each_is_alone(weights: Weights, method: str, keep: float) -> None:
    """The last tokens of a prompt are read in one pass, or step by step as here."""
    calibration = teal.calibrate(weights, torch.arange(weights.shape.vocab)[:200])
    thresholds = calibration.thresholds(keep) if keep < 1 else None
    prompts = filled(weights, LENGTHS, 3)
    expected = [alone(weights, one, method, thresholds) for one in prompts]
    asked = []
    for tokens, cache, queries in prompts:
        fork = cache.fork(cache.tokens, len(tokens) + STEPS)
        asked.append(Prompt(tokens, fork, branch_of(method, weights, fork, queries)))
    found = continued(weights, asked, STEPS, thresholds)
    assert [one.generated for one in found] == [tokens for tokens, _ in expected]
    mean = sum(r_p for _, r_p in expected) / len(expected)
    assert all(one.r_p == pytest.approx(mean, abs=1e-6) for one in found)
    assert len({tuple(one.generated) for one in found}) > 1  # a mix-up of sequences would be seen


@pytest.mark.parametrize("method", ["snapkv", "quest", "catekv"])
def test_a_method_on_its_own_storage_alone(weights: Weights, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts than a batch holds; the full cache is released, so nothing but what was kept can be read."""
    monkeypatch.setattr(continuation, "MOST", 2)
    prompts = filled(weights, range(30, 33), 1)
    expected = [alone(weights, one, method, None)[0] for one in prompts]
    asked = [Prompt(t, cache.released(), branch_of(method, weights, cache, queries)) for t, cache, queries in prompts]
    assert [one.generated for one in continued(weights, asked, STEPS, None)] == expected


def test_a_prompt_that_the_window_cuts_off_gets_fewer_tokens_and_the_others_all(weights: Weights) -> None:
    window = weights.shape.window
    asked = []
    for tokens, cache, _ in filled(weights, (40, window - 2, window), 1):
        asked.append(Prompt(tokens, cache.fork(cache.tokens, len(tokens) + STEPS)))
    found = continued(weights, asked, STEPS, None)
    assert [len(one.generated) for one in found] == [STEPS, 2, 0]
    assert found[2].r_p == 1.0
