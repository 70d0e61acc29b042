"""One rank of a decode step split by gloo: `python tests/parallel_ranks.py MODEL RANK SIZE STORE R_P OUT`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.engine import models, parallel
from artifact.engine.prefill import prefill
from artifact.projection import teal
from artifact.projection.branch import Projection

CONTEXT, STEPS = 40, 5


def whole(model: str, r_p: float) -> tuple[models.Weights, torch.Tensor, object, Projection | None]:
    """The model, fixed tokens, their prefill and the branch, the same in every process."""
    weights = models.load(model)
    tokens = torch.randint(3, 300, (CONTEXT + STEPS + 1,), generator=torch.Generator().manual_seed(5))
    filled = prefill(weights, tokens[:CONTEXT])
    branch = None
    if r_p < 1:
        calibration = torch.randint(3, 300, (200,), generator=torch.Generator().manual_seed(6))
        branch = teal.calibrate(weights, calibration).thresholds(r_p)
    return weights, tokens, filled.cache, branch


def main() -> None:
    """Decode on this rank and write the logits of every step and the counts."""
    model, index, size, store, r_p, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(index), world_size=int(size))
    rank = parallel.Rank.here()
    weights, tokens, cache, branch = whole(model, float(r_p))
    own = parallel.shard_cache(cache.fork(CONTEXT, CONTEXT + STEPS + 1), rank)  # type: ignore[attr-defined]
    decoder = parallel.ParallelDecoder(parallel.shard(weights, rank), own, tokens, rank, branch)
    logits = []
    for _ in range(STEPS):
        decoder.step()
        logits.append(decoder.logits.tolist())
    Path(out).write_text(json.dumps({"logits": logits, "counted": dataclasses.asdict(decoder.counted())}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
