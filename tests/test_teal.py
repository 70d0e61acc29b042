"""Calibrated thresholds: the channels they keep, where they came from, and what they must not have seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from artifact.engine.prefill import SITES, prefill
from artifact.errors import UserError
from artifact.projection import teal
from artifact.projection.thresholds import PROJECTIONS
from kernels.selection import mask
from tests.inputs import NAN
from tests.models_fixture import Loaded, token_ids
from tests.tolerances import KEEP_POINT

Tiny = Callable[[str], Loaded]
pytestmark = pytest.mark.usefixtures("one_thread")
SITE_OF = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}


def activations(loaded: Loaded, ids: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    prefill(loaded.weights, ids, observe=lambda layer, site, x: seen.setdefault((layer, site), []).append(x.clone()))
    return {key: torch.cat(parts) for key, parts in seen.items()}


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.6, 0.9])
def test_fault_06_counted_keep_on_the_calibration_tokens_is_the_request(tiny: Tiny, keep: float) -> None:
    loaded, ids = tiny("qwen3"), token_ids(120)
    thresholds = teal.calibrate(loaded.weights, ids).thresholds(keep)
    seen = activations(loaded, ids)
    for layer in range(3):
        for column, projection in enumerate(PROJECTIONS):
            x = seen[layer, SITE_OF[projection]][teal.SKIP :]
            counted = float(mask(x, float(thresholds.values[layer, column])).float().mean())
            assert abs(counted - keep) < KEEP_POINT, (layer, projection)


def test_the_first_tokens_do_not_count(tiny: Tiny) -> None:
    loaded, ids = tiny("llama"), token_ids(60)
    seen = activations(loaded, ids)
    calibration = teal.calibrate(loaded.weights, ids)
    for index, site in enumerate(SITES):
        largest = float(seen[1, site][teal.SKIP :].abs().max())
        assert largest <= float(calibration.quantiles[1, index, -1]) <= 1.004 * largest
    assert any(
        float(seen[layer, site][: teal.SKIP].abs().max()) > 1.01 * float(seen[layer, site][teal.SKIP :].abs().max())
        for layer, site in seen
    ), "with these tokens the test would not notice a calibration on all of them"


def test_thresholds_fall_as_more_is_kept_and_interpolate_between_levels() -> None:
    table = torch.linspace(0, 1, teal.LEVELS + 1).expand(2, 4, -1) ** 2
    calibration = teal.Calibration(table.contiguous(), "hash", 100)
    for keep in (0.3333, 0.5, 0.99999, 1e-6):
        got = calibration.thresholds(keep)
        assert got.values.shape == (2, 7) and (got.requested, got.source) == (keep, "hash")
        assert torch.allclose(got.values, torch.full((2, 7), (1 - keep) ** 2), atol=2e-6)


def test_each_projection_takes_the_quantile_of_its_own_site() -> None:
    table = torch.arange(4.0)[None, :, None].expand(1, 4, teal.LEVELS + 1).contiguous()
    values = teal.Calibration(table, "hash", 100).thresholds(0.5).values[0]
    assert [SITES[int(v)] for v in values] == [SITE_OF[p] for p in PROJECTIONS]


def test_keep_one_reads_even_channels_that_are_zero() -> None:
    calibration = teal.Calibration(torch.zeros(2, 4, teal.LEVELS + 1), "hash", 100)
    assert bool(mask(torch.zeros(5), calibration.thresholds(1.0).values[0, 0]).all())
    assert not bool(mask(torch.zeros(5), calibration.thresholds(0.999).values[0, 0]).any())


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.01, NAN])
def test_fault_09_a_keep_ratio_of_nothing_or_above_one_is_refused(keep: float) -> None:
    calibration = teal.Calibration(torch.zeros(2, 4, teal.LEVELS + 1), "hash", 100)
    with pytest.raises(UserError, match=r"projection keep ratio .* is not in \(0, 1\]"):
        calibration.thresholds(keep)


@pytest.mark.parametrize("count", [1, teal.SKIP])
def test_a_calibration_text_of_nothing_but_sinks_is_refused(tiny: Tiny, count: int) -> None:
    with pytest.raises(UserError, match=f"{count} calibration tokens"):
        teal.calibrate(tiny("llama").weights, token_ids(count))


def test_fault_07_thresholds_carry_the_hash_of_their_tokens(tiny: Tiny) -> None:
    ids = token_ids(40)
    calibration = teal.calibrate(tiny("llama").weights, ids)
    assert calibration.thresholds(0.5).source == calibration.tokens_hash == teal.hash_tokens(ids)
    assert calibration.tokens == 40 and len(calibration.tokens_hash) == 16
    assert teal.hash_tokens(ids) != teal.hash_tokens(ids.flip(0))
    assert teal.hash_tokens(ids) == teal.hash_tokens(ids.to(torch.int32))


def test_fault_07_overlapping_texts_are_refused() -> None:
    one, other = token_ids(400, seed=1), token_ids(300, seed=2)
    teal.require_disjoint(one, other)
    for shared in (one[100:164], one[336:], one):
        with pytest.raises(UserError, match="share"):
            teal.require_disjoint(one, torch.cat((other, shared, other)))
    teal.require_disjoint(one, torch.cat((other, one[100:163], other)))


def test_fault_07_a_text_shorter_than_the_run_is_still_found_inside_the_other() -> None:
    one = token_ids(400, seed=1)
    with pytest.raises(UserError, match="share 50 or more"):
        teal.require_disjoint(one, one[70:120])
    with pytest.raises(UserError, match="share 50 or more"):
        teal.require_disjoint(one[70:120], one)
    teal.require_disjoint(one, token_ids(0))


def test_calibration_is_the_same_on_every_run(tiny: Tiny) -> None:
    weights, ids = tiny("llama").weights, token_ids(80)
    assert torch.equal(teal.calibrate(weights, ids).quantiles, teal.calibrate(weights, ids).quantiles)
