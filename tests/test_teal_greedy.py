"""Greedy thresholds: effective sparsity from real shapes, the choice itself, and the claim with seeded faults."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models_fixture import saved, token_ids

from artifact.engine import models, teacher
from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.profiles import Profile
from artifact.projection import teal, teal_greedy
from artifact.projection.thresholds import PROJECTIONS
from artifact.shapes import known_shape
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import teal_greedy as claim
from tests.faults.teal_greedy import Row, greedy_is_worse, greedy_reads_more, honest

PROFILE = Profile("embedded", "model.gguf", "cpu", "float32", None, 2)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> models.Weights:
    _, path = saved("llama", tmp_path_factory.mktemp("models"))
    return models.load(str(path))


@pytest.fixture(scope="module")
def calibration(weights: models.Weights) -> teal.Calibration:
    return teal.calibrate(weights, token_ids(300, seed=3))


def test_shares_are_those_of_the_real_shapes() -> None:
    shape = known_shape("Llama-3.1-8B")
    share = dict(zip(PROJECTIONS, teal_greedy.shares(shape).tolist(), strict=True))
    layer = 218_103_808
    assert share["q"] == pytest.approx(4096 * 4096 / layer)
    assert share["k"] == share["v"] == pytest.approx(4096 * 1024 / layer)
    assert share["down"] == pytest.approx(4096 * 14336 / layer)
    assert sum(share.values()) == pytest.approx(1)


@pytest.mark.parametrize("keep", [0.7, 0.5, 0.35])
def test_every_layer_meets_its_effective_ratio(
    weights: models.Weights, calibration: teal.Calibration, keep: float
) -> None:
    greedy = teal_greedy.allocate(weights, calibration, token_ids(300, seed=3), keep)
    assert teal_greedy.effective_keep(weights.shape, greedy.keeps).tolist() == pytest.approx([keep] * 3, abs=1e-6)
    assert float(greedy.keeps.min()) >= 1 - teal_greedy.MOST - 1e-9
    window = token_ids(140, seed=8)
    cache = prefill(weights, window[:100]).cache
    block = teacher.forward(weights, cache, window[100:], greedy.thresholds(keep))
    assert block.r_p == pytest.approx(keep, abs=0.08)


def test_the_choice_follows_the_error() -> None:
    """With a known cost per projection the greedy choice empties the cheap one first and leaves the dear one."""
    share = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    cost = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    keeps = teal_greedy.allocate_layer(lambda k: float((cost * (1 - k)).sum()), share, 0.7)
    assert float(keeps @ share) == pytest.approx(0.7)
    assert keeps.tolist() == pytest.approx([0.05, 0.75, 1.0])


def test_equal_costs_per_weight_are_spread_when_errors_grow() -> None:
    share = torch.tensor([0.5, 0.5], dtype=torch.float64)
    keeps = teal_greedy.allocate_layer(lambda k: float(((1 - k) ** 2).sum()), share, 0.6)
    assert keeps.tolist() == pytest.approx([0.6, 0.6], abs=teal_greedy.STEP)


def test_block_errors_are_those_of_the_layer(weights: models.Weights, calibration: teal.Calibration) -> None:
    """No sparsity is no error; the dense input of a layer is the output of the one before it."""
    tokens = token_ids(200, seed=4)
    error = teal_greedy.block_errors(weights, calibration, tokens)
    assert error(1, torch.ones(7)) < 1e-6
    assert error(1, torch.full((7,), 0.5)) > 0.05
    part = prefill(weights, tokens[:150])
    run = teacher.Layerwise(weights, part.cache, tokens[150:])
    whole = teacher.forward(weights, part.cache, tokens[150:])
    assert torch.allclose(run.output(2, None), whole.hidden, atol=1e-4, rtol=1e-4)


def test_another_ratio_than_the_allocated_one_is_refused(
    weights: models.Weights, calibration: teal.Calibration
) -> None:
    greedy = teal_greedy.Greedy(calibration, 0.5, torch.full((3, 7), 0.5))
    assert torch.equal(greedy.thresholds(0.5).values, calibration.thresholds(0.5).values)
    with pytest.raises(UserError, match="allocate again"):
        greedy.thresholds(0.6)
    with pytest.raises(UserError, match="not in"):
        teal_greedy.allocate(weights, calibration, token_ids(300), 1.0)
    with pytest.raises(UserError, match="too few"):
        teal_greedy.allocate(weights, calibration, token_ids(60), 0.5)


def test_as_published_on_a_model_of_that_scale() -> None:
    for name in ("embedded", "paper"):
        profile = Profile(name, "m", "cpu", "float32", None, 2)
        assert summarise(claim.judge(honest(), profile)) is Verdict.REPRODUCED


@pytest.mark.parametrize(("fault", "number"), [(greedy_reads_more, 0), (greedy_is_worse, 1)])
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None], number: int) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    paper = Profile("paper", "m", "cuda", "float16", None, 2)
    assert claim.judge(rows, paper)[number].verdict is Verdict.CONTRADICTED


def test_unequal_arms_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="windows"):
        claim.judge(honest()[:-1], PROFILE)
