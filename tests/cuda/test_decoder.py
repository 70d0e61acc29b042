"""Whole steps on the Triton kernels, in every mode, against the gate's plain torch form; the CPU's kernels agree."""

from __future__ import annotations

import importlib

import pytest
import torch

pytest.importorskip("triton")

import kernels
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prepare import Prepared, prepare_synthetic
from artifact.engine.reference import gate_step
from artifact.measure import cells
from artifact.measure.cells import member
from artifact.projection.lora import AdaptedMask, random_adapter
from artifact.projection.masked import GateMask
from artifact.shapes import Shape

SHAPE = Shape("tiny", 96, 2, 6, 2, 32, 160, 211, 1024, False)
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def triton_backend() -> None:
    """Without a GPU every operation of these tests runs in Triton's interpreter on CPU tensors."""
    if not torch.cuda.is_available():
        patch = pytest.MonkeyPatch()
        patch.setattr(kernels, "backend", lambda op, tensor: importlib.import_module(f"kernels.cuda.{op}"))
        ops = ("attention", "gate_up", "gather", "gemv", "masked_mlp", "rope_append", "score", "sparse_gemv", "token")
        for op in ops:
            patch.setattr(f"kernels.{op}.backend", kernels.backend)
        yield
        patch.undo()
    else:
        yield


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FULL_PRECISION = 1e-5  # float32 sums of a few hundred terms in two orders; one tensor-core product rounds to 5e-4


@pytest.fixture(scope="module", params=DTYPES.values(), ids=DTYPES)
def prepared(device: torch.device, request: pytest.FixtureRequest) -> Prepared:
    if request.param is torch.bfloat16 and device.type != "cuda":
        pytest.skip("Triton's interpreter cuts bfloat16 off and multiplies its bit patterns")
    return prepare_synthetic(SHAPE, device.type, request.param, 512 + STEPS + cells.EXTRA_STEPS)


def gated(decoder: Decoder) -> float:
    """The gate's worst error in machine epsilons of the weights, in FULL_PRECISION of float32 ones."""
    return gate_step(decoder) / max(torch.finfo(decoder.weights.dtype).eps, FULL_PRECISION)


@pytest.mark.parametrize(("r_p", "r_kv"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.3), (0.6, 0.4)])
def test_every_operation_of_a_step_passes_the_gate(prepared: Prepared, r_p: float, r_kv: float) -> None:
    decoder = cells.build(prepared, member(256, r_p, r_kv), STEPS)
    assert len(decoder.ops) == 5 * SHAPE.layers + 3
    assert gated(decoder) < 1.0
    assert gated(decoder) < 1.0
    counted = decoder.counted()
    assert counted.steps == 2 and abs(counted.r_p - r_p) < 0.1
    kept = int(256 * r_kv + 0.5) + 1.5
    item = prepared.weights.dtype.itemsize
    assert counted.kv_bytes == kept * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2 * item


def test_q_and_k_norms_ride_on_attention(prepared: Prepared) -> None:
    from dataclasses import replace

    weights = prepared.weights
    gains = [torch.rand(2, SHAPE.head_dim, device=weights.device) + 0.5 for _ in weights.layers]
    layers = tuple(replace(one, q_norm=g[0], k_norm=g[1]) for one, g in zip(weights.layers, gains, strict=True))
    normed: Weights = replace(weights, layers=layers)
    decoder = cells.build(replace(prepared, weights=normed), member(256), STEPS)
    assert gated(decoder) < 1.0


@pytest.mark.parametrize("adapted", [False, True])
def test_the_gate_mask_passes_the_gate_on_both_paths(prepared: Prepared, adapted: bool) -> None:
    weights, ids = prepared.weights, prepared.tokens
    table = torch.zeros(SHAPE.vocab, dtype=torch.bool, device=ids.device)
    table[ids[256]] = True
    mask = GateMask(torch.tensor([0.1, 0.2]), table)
    branch = AdaptedMask(mask, random_adapter(SHAPE, 4, size=0.5)) if adapted else mask
    decoder = Decoder(weights, prepared.cache.share(256), ids, branch)
    total = decoder.projections.counters[1]
    assert decoder.takes_branch() and gated(decoder) < 1.0
    before = total.clone()
    assert int(before[0, 1]) == 1 and bool((before[:, 0] < SHAPE.intermediate).all())
    base = not bool(table[ids[257]])
    assert decoder.takes_branch() is not base and gated(decoder) < 1.0
    if base:
        assert bool(((total - before) == torch.tensor([SHAPE.intermediate, 0, SHAPE.intermediate]).to(total)).all())
