"""What a first run would otherwise wait for: the embedded model converted to tensors, the CPU kernels compiled, the
prompt that the timing claims decode from prefilled.

    python -m artifact.measure.warm

Half a minute, a minute and half a minute; all ends up on disk and is looked up afterwards. Compiled code depends on
group size and head dimension, which are those of the embedded model.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from artifact import embedded, profiles
from artifact.engine import models
from artifact.engine.decoder import Decoder
from artifact.engine.prepare import Prepared, prepare_synthetic
from artifact.measure import kv_arms
from artifact.measure.cells import EXTRA_STEPS, build, member, prepared_for, request
from artifact.measure.crossing_cells import longest_context, model_shape
from artifact.measure.kv_arms import Arm
from artifact.shapes import Shape
from claims import crossover
from kernels.bandwidth import read_bandwidth

CONTEXT, STEPS = 256, 1


def small(shape: Shape) -> Shape:
    """Return the shape with one layer and few outputs; heads and their size stay."""
    return dataclasses.replace(shape, name="warm", layers=1, intermediate=256, vocab=256)


def kv_methods(prepared: Prepared) -> None:
    """Take a step from each kind of storage: ragged, paged, pruned."""
    layers, kv_heads = prepared.cache.lengths.shape
    arms = (
        Arm(
            "ragged",
            "catekv",
            options={"sinks": 4, "recent": 16, "critical": 44, "adaptive": [[1] * kv_heads] * layers},
        ),
        Arm("paged", "quest", 0.5),
        Arm("pruned", "spark"),
    )
    for arm in arms:
        cache = prepared.cache.fork(CONTEXT, CONTEXT + STEPS)
        branch = kv_arms.bind(arm, cache, prepared.queries[CONTEXT], prepared.scale(), STEPS)
        Decoder(prepared.weights, cache.released(), prepared.tokens, packed=branch).step()


def prompt() -> None:
    """Make the tokens, thresholds and prefill of the crossing claim, which every other timing claim shares."""
    profile = profiles.choose("embedded")
    longest = longest_context(model_shape(profile), crossover.STEPS, synthetic=False)
    prepared_for(request(profile, [], crossover.STEPS, longest))


def main() -> None:
    """Convert, compile and prefill, or find it done."""
    shape = models.load(str(embedded.path())).shape
    prepared = prepare_synthetic(small(shape), "cpu", torch.float32, CONTEXT + STEPS + EXTRA_STEPS)
    for r_p, r_kv in itertools.product((1.0, 0.5), (1.0, 0.3)):
        build(prepared, member(CONTEXT, r_p, r_kv), STEPS).step()
    kv_methods(prepared)
    read_bandwidth(torch.device("cpu"), bytes_read=1 << 20, repeats=1)
    prompt()


if __name__ == "__main__":
    main()
