"""A real checkpoint on a GPU: prefill, calibration, scoring and decode steps agree with the CPU and with each other.

Needs a GPU: everything here but the kernels is torch, whose GPU forms no interpreter stands in for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from artifact.engine import models, teacher
from artifact.engine import prefill as module
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prefill import prefill
from artifact.kv.snapkv import SnapKV
from artifact.measure import quality
from artifact.measure.configuration import Configuration
from artifact.projection import teal
from tests.inputs import relative
from tests.models_fixture import saved, token_ids

CONTEXT, SCORED = 120, 16
HALF = 5e-3  # float16 products of a few layers, against float32
SNAPKV = SnapKV(rows=8, width=5)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module", params=["llama", "mistral"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    """Return one checkpoint on the CPU in float32 and on the GPU in float16."""
    path: Path = saved(request.param, tmp_path_factory.mktemp("models"))[1]
    return models.load(str(path)), models.load(str(path), "cuda", torch.float16)


def test_prefill_in_row_chunks_equals_the_prefill_of_the_cpu(
    both: tuple[Weights, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GPU_ROWS", 50)
    tokens = token_ids(CONTEXT)
    cpu, gpu = (prefill(weights, tokens, query_lengths=[64, CONTEXT], rows=8) for weights in both)
    assert relative(gpu.cache.keys.cpu(), cpu.cache.keys) < HALF
    assert relative(gpu.cache.values.cpu(), cpu.cache.values) < HALF
    assert relative(gpu.hidden.cpu(), cpu.hidden) < HALF
    assert relative(torch.stack(gpu.queries[64]).cpu(), torch.stack(cpu.queries[64])) < HALF


def test_calibration_agrees_with_that_of_the_cpu(both: tuple[Weights, Weights]) -> None:
    cpu, gpu = (teal.calibrate(weights, token_ids(200)) for weights in both)
    assert gpu.tokens_hash == cpu.tokens_hash
    assert relative(gpu.quantiles, cpu.quantiles) < 0.02


@pytest.mark.parametrize(
    "arm",
    [
        Configuration(),
        Configuration(r_kv=0.3, method="snapkv", snapkv=SNAPKV),
        Configuration(r_kv=0.3, method="window"),
    ],
    ids=lambda arm: arm.label,
)
def test_one_pass_equals_decode_steps(both: tuple[Weights, Weights], arm: Configuration) -> None:
    weights, window = both[1], token_ids(CONTEXT + SCORED + 1, seed=5)
    filled = prefill(weights, window[:CONTEXT], None, (CONTEXT,), 16)
    inputs = (weights, None, filled.cache, filled.queries[CONTEXT], window, arm)
    assert quality.stepwise_difference(*inputs, SCORED) <= quality.tolerance_nats(weights.dtype, arm.r_p < 1)


def test_a_thresholded_pass_reads_what_decode_steps_read(both: tuple[Weights, Weights]) -> None:
    weights, window = both[1], token_ids(CONTEXT + SCORED + 1, seed=5)
    thresholds = teal.calibrate(weights, token_ids(400, seed=9)).thresholds(0.5)
    cache = prefill(weights, window[:CONTEXT], CONTEXT + SCORED).cache
    block = teacher.forward(weights, cache, window[CONTEXT : CONTEXT + SCORED], thresholds)
    decoder = Decoder(weights, cache, window.to(weights.device), thresholds)
    for _ in range(SCORED):
        decoder.step()
    assert abs(decoder.counted().r_p - block.r_p) < 0.01  # channels within rounding of a threshold
    assert abs(block.r_p - 0.5) < 0.1
