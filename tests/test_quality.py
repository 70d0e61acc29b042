"""Decode-position perplexity: one pass against real decode steps and against transformers, windows, arms, protocol."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models_fixture import Loaded, saved, token_ids

from artifact.engine import models, teacher
from artifact.engine.cache import KVCache
from artifact.engine.prefill import Prefill, logits, prefill
from artifact.errors import UserError
from artifact.kv.snapkv import SnapKV
from artifact.kv.window import Window
from artifact.measure import quality
from artifact.measure.configuration import Configuration, bind, check_r_p, check_retained, from_record
from artifact.projection import teal

CONTEXT, SCORED = 120, 24
NAMES = ("llama", "llama-biased", "qwen3", "mistral")
SNAPKV = SnapKV(rows=8, width=5)
ARMS = [
    Configuration(),
    Configuration(r_p=0.5),
    Configuration(r_kv=0.3, method="snapkv", snapkv=SNAPKV),
    Configuration(r_kv=0.3, method="window"),
    Configuration(0.6, 0.25, "snapkv", SNAPKV),
]


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    model, path = saved(request.param, tmp_path_factory.mktemp("models"))
    return Loaded(model, path, models.load(str(path)))


@pytest.fixture(scope="module")
def window() -> torch.Tensor:
    return token_ids(CONTEXT + SCORED + 1, seed=5)


def prefilled(loaded: Loaded, window: torch.Tensor) -> Prefill:
    return prefill(loaded.weights, window[:CONTEXT], None, (CONTEXT,), 16)


def calibrated(loaded: Loaded) -> teal.Calibration:
    return teal.calibrate(loaded.weights, token_ids(400, seed=9))


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.label)
def test_one_pass_equals_decode_steps(loaded: Loaded, window: torch.Tensor, arm: Configuration) -> None:
    filled, calibration = prefilled(loaded, window), calibrated(loaded)
    inputs = (loaded.weights, calibration, filled.cache, filled.queries[CONTEXT], window, arm)
    passed = quality.score(*inputs)["nll"]
    stepped = quality.score_stepwise(*inputs, SCORED)
    assert len(passed) == SCORED
    assert max(abs(a - b) for a, b in zip(passed, stepped, strict=True)) < 2e-3
    assert filled.cache.tokens == CONTEXT


def test_dense_scores_are_those_of_transformers(loaded: Loaded, window: torch.Tensor) -> None:
    filled = prefilled(loaded, window)
    nll = quality.score(loaded.weights, None, filled.cache, filled.queries[CONTEXT], window, Configuration())["nll"]
    with torch.no_grad():
        scores = loaded.model(window[None, :-1]).logits[0, CONTEXT:].double()
    expected = torch.nn.functional.cross_entropy(scores, window[CONTEXT + 1 :], reduction="none")
    assert torch.allclose(torch.tensor(nll, dtype=torch.float64), expected, atol=2e-3)


def test_a_pass_that_ignores_its_branch_differs_from_steps(
    loaded: Loaded, window: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled, calibration = prefilled(loaded, window), calibrated(loaded)
    inputs = (loaded.weights, calibration, filled.cache, filled.queries[CONTEXT], window, ARMS[2])
    allowed = quality.tolerance_nats(loaded.weights.dtype, ARMS[2].r_p < 1)
    assert quality.stepwise_difference(*inputs, 8) <= allowed
    honest = teacher.forward
    monkeypatch.setattr(teacher, "forward", lambda w, c, t, thresholds, packed: honest(w, c, t, thresholds, None))
    assert quality.stepwise_difference(*inputs, 8) > allowed


def test_ignored_thresholds_are_an_error(loaded: Loaded, window: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    filled, calibration = prefilled(loaded, window), calibrated(loaded)
    honest = teacher.forward
    monkeypatch.setattr(teacher, "forward", lambda w, c, t, thresholds, packed: honest(w, c, t, None, packed))
    with pytest.raises(RuntimeError, match=r"asked was 0\.5"):
        quality.score(loaded.weights, calibration, filled.cache, filled.queries[CONTEXT], window, ARMS[1])


def test_extending_a_prefix_is_the_prefill_of_the_whole(
    loaded: Loaded, window: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "ROWS", 7)  # several passes, the last one short
    whole = prefill(loaded.weights, window[:CONTEXT], None, (CONTEXT,), 16)
    part = prefill(loaded.weights, window[:50], CONTEXT)
    block = teacher.extend(loaded.weights, part.cache, window[50:CONTEXT], 16)
    assert part.cache.tokens == CONTEXT
    for mine, expected in ((part.cache.keys, whole.cache.keys), (part.cache.values, whole.cache.values)):
        assert torch.allclose(mine, expected, atol=1e-4, rtol=1e-4)
    assert torch.allclose(torch.stack(block.queries), torch.stack(whole.queries[CONTEXT]), atol=1e-4, rtol=1e-4)
    last = logits(loaded.weights, block.hidden[-1:])
    assert torch.allclose(last, logits(loaded.weights, whole.hidden[-1:]), atol=1e-3, rtol=1e-3)


def test_scoring_reads_no_slot_behind_the_prompt(loaded: Loaded, window: torch.Tensor) -> None:
    filled = prefilled(loaded, window)
    roomy = filled.cache.fork(CONTEXT, CONTEXT + 40)
    roomy.keys[:, :, CONTEXT:] = math.nan
    roomy.values[:, :, CONTEXT:] = math.nan
    nll = quality.score(loaded.weights, None, roomy, filled.queries[CONTEXT], window, Configuration())["nll"]
    assert all(math.isfinite(value) for value in nll)


def cache_of(tokens: int) -> KVCache:
    generator = torch.Generator().manual_seed(0)
    size = (2, 2, tokens, 4)
    keys, values = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    cache = KVCache(keys, values, torch.zeros(1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32))
    cache.set_tokens(tokens)
    return cache


def test_a_window_posing_as_a_selection_is_an_error() -> None:
    cache = cache_of(200)
    arm = Configuration(r_kv=0.5, method="snapkv", snapkv=SNAPKV)
    with pytest.raises(RuntimeError, match="not a selection"):
        check_retained(arm, cache, Window(SNAPKV.sinks).select(cache, 0.5, 0))


def test_an_ignored_ratio_is_an_error() -> None:
    cache = cache_of(200)
    with pytest.raises(RuntimeError, match="retained 60 to 60 entries per head, asked were 100"):
        check_retained(Configuration(r_kv=0.5, method="window"), cache, Window().select(cache, 0.3, 0))


def test_other_entries_than_the_window_are_an_error() -> None:
    cache = cache_of(200)
    packed = Window().select(cache, 0.3, 0)
    packed.keys[1, 0, 9] += 1
    with pytest.raises(RuntimeError, match="other entries"):
        check_retained(Configuration(r_kv=0.3, method="window"), cache, packed)


@pytest.mark.parametrize(
    "arguments",
    [{"r_p": 0.0}, {"r_p": 1.2}, {"r_kv": 0.3}, {"method": "snapkv"}, {"r_kv": -0.1, "method": "window"}],
)
def test_a_label_that_would_lie_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Configuration(**arguments)


def test_sparsity_without_thresholds_is_refused() -> None:
    with pytest.raises(UserError, match="thresholds"):
        bind(Configuration(r_p=0.5), SimpleNamespace(shape=None), None, cache_of(8), [], 0)  # type: ignore[arg-type]


@given(st.sampled_from(ARMS))
def test_a_stored_configuration_is_the_effective_one(arm: Configuration) -> None:
    assert from_record(arm.record()) == arm


def test_a_counted_share_off_the_request_is_an_error() -> None:
    check_r_p(Configuration(r_p=0.5), 0.52)
    with pytest.raises(RuntimeError, match=r"read 1\.000"):
        check_r_p(Configuration(r_p=0.5), 1.0)
    with pytest.raises(RuntimeError, match="asked was all"):
        check_r_p(Configuration(), 0.99)


class Letters:
    """A tokenizer with one token per character, with or without a BOS."""

    def __init__(self, bos: int | None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = [ord(letter) % 300 + 3 for letter in text]
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return SimpleNamespace(input_ids=start + ids)


def test_windows_are_disjoint_and_carry_exactly_one_bos() -> None:
    text = "".join(chr(33 + i % 90) for i in range(1000))
    protocol = quality.Protocol(20, 4, 5)
    plain = quality.windows(Letters(None), text, protocol, "t")  # type: ignore[arg-type]
    marked = quality.windows(Letters(1), text, protocol, "t")  # type: ignore[arg-type]
    assert plain.tokens.shape == marked.tokens.shape == (5, 25)
    assert plain.tokens.flatten().tolist() == Letters(None)(text[:125]).input_ids
    assert marked.tokens[:, 0].tolist() == [1] * 5
    assert marked.tokens[:, 1:].flatten().tolist() == Letters(None)(text[:120]).input_ids
    assert plain.hash != marked.hash


def test_the_first_windows_begin_as_the_others_do_and_are_another_protocol() -> None:
    text = "".join(chr(33 + i % 90) for i in range(1000))
    cut = quality.windows(Letters(1), text, quality.Protocol(20, 8, 4), "t")  # type: ignore[arg-type]
    first = cut.first(2, 3)
    assert torch.equal(first.tokens, cut.tokens[:2, :24]) and first.bos == 1
    assert first.protocol == quality.Protocol(20, 3, 2) and first.hash != cut.hash


def test_the_protocol_hash_moves_with_everything_that_decides() -> None:
    text = "".join(chr(33 + i % 90) for i in range(1000))
    make = lambda c, s, w, t=text: quality.windows(Letters(None), t, quality.Protocol(c, s, w), "t").hash  # type: ignore[arg-type] # noqa: E731
    hashes = [make(20, 4, 5), make(21, 3, 5), make(20, 5, 5), make(20, 4, 4), make(20, 4, 5, text[1:])]
    assert len(set(hashes)) == len(hashes)
    assert make(20, 4, 5) == hashes[0]


def test_a_short_text_is_refused() -> None:
    with pytest.raises(UserError, match="125 are needed"):
        quality.windows(Letters(None), "short", quality.Protocol(20, 4, 5), "t")  # type: ignore[arg-type]


def test_calibration_on_the_evaluated_text_is_refused() -> None:
    tokens = token_ids(400, seed=2)
    cut = quality.Windows(quality.Protocol(100, 8, 1), tokens[150:259][None], None, "t")
    calibration = teal.Calibration(torch.zeros(1, 4, 1001), teal.hash_tokens(tokens), 400)
    with pytest.raises(UserError, match="overlap"):
        quality.check_calibration(calibration, cut, tokens)
    with pytest.raises(UserError, match="other tokens"):
        quality.check_calibration(calibration, cut, tokens[:399])


def row(label: str, window: int, nll: list[float], protocol: str = "p") -> dict[str, Any]:
    return {"label": label, "window": window, "nll": nll, "protocol": protocol, "window_tokens_hash": f"w{window}"}


def test_perplexity_and_increase_by_hand() -> None:
    rows = [row("dense", 0, [1.0, 3.0]), row("dense", 1, [2.0, 4.0])]
    rows += [row("kv30", 0, [1.1, 3.1]), row("kv30", 1, [2.1, 4.1])]
    found = quality.losses(rows)
    assert quality.perplexity(found, "dense").point == pytest.approx(math.exp(2.5))
    change = quality.increase(found, "kv30")
    assert (change.point, change.low, change.high) == pytest.approx([math.expm1(0.1)] * 3)
    assert change.n == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([row("kv30", 0, [1.0, 1.0])], "has windows"),
        ([row("kv30", 0, [1.0, 1.0]), row("kv30", 1, [1.0])], "other tokens"),
        ([row("kv30", 0, [1.0, 1.0]), row("kv30", 0, [1.0, 1.0])], "twice"),
        ([row("kv30", 0, [1.0, 1.0]), row("kv30", 1, [1.0, 1.0], "q")], "protocols"),
        ([row("kv30", 0, [1.0, 1.0]), row("kv30", 1, [1.0, 1.0]) | {"window_tokens_hash": "x"}], "other tokens"),
    ],
)
def test_unequal_arms_are_errors(extra: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quality.losses([row("dense", 0, [1.0, 1.0]), row("dense", 1, [1.0, 1.0]), *extra])


def test_a_prompt_beyond_the_window_is_refused(tmp_path: Path) -> None:
    _, path = saved("llama", tmp_path)
    weights = models.load(str(path))
    filled = prefill(weights, token_ids(500))
    with pytest.raises(UserError, match="window of 512"):
        teacher.forward(weights, filled.cache, token_ids(20))
