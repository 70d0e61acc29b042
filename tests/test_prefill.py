"""Dense prefill against transformers, and what the cache of a prompt holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from artifact.engine import prefill as module
from artifact.engine.prefill import SITES, logits, prefill
from artifact.errors import UserError
from tests.float64_decoder import Reference
from tests.inputs import relative
from tests.models_fixture import MODELS, Loaded, token_ids
from tests.tolerances import LOGITS

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", MODELS)
def test_fault_19_and_27_logits_equal_transformers_and_float64(tiny: Tiny, name: str) -> None:
    loaded, ids = tiny(name), token_ids(150)
    got = logits(loaded.weights, prefill(loaded.weights, ids).hidden)
    with torch.inference_mode():
        expected = loaded.model(ids[None]).logits[0]
    assert relative(got, expected) < LOGITS
    # The float64 reference of the decode tests stands on its own: it must agree with transformers too.
    assert relative(Reference(loaded.model).logits(ids)[0], expected) < LOGITS


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_prefix_of_the_cache_is_the_cache_of_the_prefix(tiny: Tiny, name: str) -> None:
    weights, ids = tiny(name).weights, token_ids(120)
    long, short = prefill(weights, ids, query_lengths=[70, 5, 120], rows=16), prefill(weights, ids[:70], 90, [70], 16)
    assert (long.cache.tokens, short.cache.tokens, short.cache.capacity) == (120, 70, 90)
    assert short.cache.lengths.tolist() == [[70] * weights.shape.kv_heads] * weights.shape.layers
    for whole, part in ((long.cache.keys, short.cache.keys), (long.cache.values, short.cache.values)):
        assert relative(whole[:, :, :70], part[:, :, :70]) < LOGITS
    for layer in range(weights.shape.layers):
        assert relative(long.queries[70][layer], short.queries[70][layer]) < LOGITS
        assert long.queries[120][layer].shape == (weights.shape.heads, 16, weights.shape.head_dim)
        assert long.queries[5][layer].shape == (weights.shape.heads, 5, weights.shape.head_dim)


def test_rows_of_the_mlp_are_independent_of_the_chunk(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, ids = tiny("llama-biased").weights, token_ids(50)
    whole = prefill(weights, ids).hidden
    monkeypatch.setattr(module, "MLP_ROWS", 7)
    assert relative(prefill(weights, ids).hidden, whole) < LOGITS


def test_the_observer_sees_every_row_of_every_site_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, ids = tiny("qwen3").weights, token_ids(50)
    monkeypatch.setattr(module, "MLP_ROWS", 16)
    rows: dict[tuple[int, str], int] = {}
    shape = weights.shape
    widths = {"qkv": shape.hidden, "o": 192, "gate_up": shape.hidden, "down": shape.intermediate}

    def observe(layer: int, site: str, x: torch.Tensor) -> None:
        rows[layer, site] = rows.get((layer, site), 0) + x.shape[0]
        assert x.shape[1] == widths[site] and bool(torch.isfinite(x).all())

    prefill(weights, ids, observe=observe)
    assert rows == {(layer, site): 50 for layer in range(shape.layers) for site in SITES}


def test_fault_15_an_exception_midway_leaves_nothing_behind(tiny: Tiny) -> None:
    weights, ids = tiny("llama").weights, token_ids(40)
    before = prefill(weights, ids)

    def observe(layer: int, site: str, x: torch.Tensor) -> None:
        x.mul_(2.0)
        if layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(weights, token_ids(60, seed=1), observe=observe)
    after = prefill(weights, ids)
    assert torch.equal(after.hidden, before.hidden) and torch.equal(after.cache.keys, before.cache.keys)


def test_progress_ends_at_one(tiny: Tiny) -> None:
    shares: list[float] = []
    prefill(tiny("llama").weights, token_ids(3), progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (0, {}, "a prompt of 0 tokens does not fit the model's window of 512"),
        (513, {}, "a prompt of 513 tokens does not fit"),
        (20, {"capacity": 19}, "20 tokens does not fit a capacity of 19"),
        (20, {"query_lengths": [21]}, r"queries are asked for at \[21\] tokens of a prompt of 20"),
    ],
)
def test_what_does_not_fit_is_said(tiny: Tiny, count: int, options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prefill(tiny("llama").weights, token_ids(count), **options)  # type: ignore[arg-type]
