"""Decode steps of a model split over the GPUs of one machine: the measuring task, and its ranks.

A model that needs several GPUs leaves no room for its projections in both layouts. Dense decoding and the KV branch
take turns step by step on output-major weights; the projection branch is timed on input-major ones made anew, before
or after them. Weights and caches are synthetic and of exact shape.

    python -m artifact.measure.parallel_cells RANK FOLDER    (one rank; the request is FOLDER/request.json)
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from artifact.account import Mode
from artifact.engine import models
from artifact.engine.cache import KVCache
from artifact.engine.parallel import ParallelDecoder, Rank, local_shape
from artifact.engine.prepare import RandomQueries
from artifact.engine.timing import interleave
from artifact.kv.snapkv import SnapKV
from artifact.projection.thresholds import PROJECTIONS, Thresholds
from artifact.shapes import Shape
from artifact.worker import THREAD_VARIABLES

Row = dict[str, Any]
TASK = "artifact.measure.parallel_cells:timed"
WARMUP_STEPS = 3
OBSERVED_STEPS = 4  # per round of calibration
ROUNDS = 2  # the second under the thresholds of the first: what is skipped makes later activations smaller
ROOM_STEPS = WARMUP_STEPS + ROUNDS * OBSERVED_STEPS + 1
KEEP_TOLERANCE = 0.03
POLL_S = 0.2
# The launch before which a site's input stands in a buffer, and the thresholds that it has.
SITES = {"qkv": (0, 3), "o": (3, 4), "gate_up": (4, 6), "down": (6, 7)}


def timed(params: Row) -> Iterator[Row]:
    """Task: a row per mode and rank, with the ms of every step and what the rank read.

    params: shape, device ("cpu" or "cuda"), dtype, size (ranks), context, steps, r_p, r_kv, order_seed. Raises
    RuntimeError with a rank's last words when one fails; the others are then ended.
    """
    yield {"progress": 0.0, "doing": f"starting {params['size']} ranks"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(params), encoding="utf-8")
        started = [_start(rank, folder, int(params["size"])) for rank in range(int(params["size"]))]
        try:
            while any(one.poll() is None for one in started):
                if any(one.poll() for one in started):
                    break
                time.sleep(POLL_S)
                yield {"progress": 0.1, "doing": f"decoding at {params['context']:,} tokens on {params['size']} ranks"}
            for rank, one in enumerate(started):
                if one.poll():
                    said = (folder / f"rank-{rank}.log").read_text("utf-8", "replace").strip().splitlines()
                    last = said[-1][:300] if said else "no message"
                    raise RuntimeError(f"rank {rank} ended with status {one.returncode}: {last}")
        finally:
            for one in started:
                one.kill()
                one.wait()
        for rank in range(int(params["size"])):
            yield from json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))


def _start(rank: int, folder: Path, size: int) -> subprocess.Popen[bytes]:
    """A rank with its share of the threads; it ends with this process's group."""
    threads = max(1, int(os.environ.get("OMP_NUM_THREADS", "1")) // size)
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "artifact.measure.parallel_cells", str(rank), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads)),
        )


def main() -> None:
    """Measure this rank's part and leave its rows in the folder."""
    index, folder = int(sys.argv[1]), Path(sys.argv[2])
    params = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    size, cuda = int(params["size"]), params["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(index)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # without a network no other interface has an address
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder / 'store'}", rank=index, world_size=size
    )
    rows = measure(params, Rank.here(), f"cuda:{index}" if cuda else "cpu")
    (folder / f"rank-{index}.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(params: Row, rank: Rank, device: str) -> list[Row]:
    """Rows of one rank: both layouts one after the other, in an order that alternates from block to block."""
    phases = [(Mode.PROJECTION,), (Mode.DENSE, Mode.KV)]
    rows = []
    for modes in phases if int(params["order_seed"]) % 2 == 0 else phases[::-1]:
        rows += phase(params, rank, device, modes)
        gc.collect()  # decoders refer to themselves, and the other layout needs their memory
        if device != "cpu":
            torch.cuda.empty_cache()
        dist.barrier()
    return rows


def phase(params: Row, rank: Rank, device: str, modes: tuple[Mode, ...]) -> list[Row]:
    """Rows of the modes that share one layout, timed in turns. RuntimeError when one did not read what it says."""
    shape, context, steps = Shape(**params["shape"]), int(params["context"]), int(params["steps"])
    local, dtype = local_shape(shape, rank.size), getattr(torch, params["dtype"])
    weights = models.synthetic(local, device, dtype, rank.index, input_major=Mode.PROJECTION in modes)
    room = steps + ROOM_STEPS
    cache = KVCache.allocate(local, context + room, device, dtype)
    generator = torch.Generator(device=device).manual_seed(rank.index)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    cache.set_tokens(context)
    # Every rank embeds the same token, from rows of its own: local vocabularies are parts of the whole one.
    tokens = torch.randint(local.vocab, (context + room + 1,), generator=torch.Generator().manual_seed(0)).to(device)
    projection = calibrated(weights, cache, tokens, rank, float(params["r_p"])) if Mode.PROJECTION in modes else None
    decoders = {}
    for mode in modes:
        packed = None
        if mode is Mode.KV:
            queries = RandomQueries(local, device, rank.index)[context]
            packed = SnapKV().select(cache, queries, float(params["r_kv"]), local.head_dim**-0.5, room)
        decoders[mode.value] = ParallelDecoder(weights, cache.share(context), tokens, rank, projection, packed)
    for decoder in decoders.values():
        decoder.step()
        if device != "cpu":
            decoder.local.capture()
    samples = interleave(decoders, steps, WARMUP_STEPS, int(params["order_seed"]))
    rows = []
    for name, decoder in decoders.items():
        counted = decoder.counted()
        check(Mode(name), counted.r_p, counted.r_kv, params)
        rows.append(
            {
                "kind": "rank",
                "mode": name,
                "rank": rank.index,
                "ranks": rank.size,
                "context": context,
                **samples[name].row(),
                "counted_r_p": counted.r_p,
                "counted_r_kv": counted.r_kv,
                "projection_bytes": counted.projection_bytes,
                "kv_bytes": counted.kv_bytes,
                "head_bytes": counted.head_bytes,
                "shape": dataclasses.asdict(shape),
            }
        )
    return rows


def calibrated(weights: models.Weights, cache: KVCache, tokens: torch.Tensor, rank: Rank, keep: float) -> Thresholds:
    """Thresholds by quantile of what this rank's projections read in real steps of all ranks."""
    values = torch.full((weights.shape.layers, len(PROJECTIONS)), -1.0)
    for _ in range(ROUNDS):
        branch = Thresholds(values, keep, "synthetic")
        decoder = ParallelDecoder(weights, cache.share(cache.tokens), tokens, rank, branch)
        seen: dict[tuple[int, str], list[torch.Tensor]] = {}
        for _ in range(OBSERVED_STEPS):
            observe(decoder, seen)
        values = torch.empty_like(values)
        for (layer, site), inputs in seen.items():
            first, end = SITES[site]
            values[layer, first:end] = torch.cat(inputs).quantile(1 - keep)
    return Thresholds(values, keep, "synthetic")


def observe(decoder: ParallelDecoder, seen: dict[tuple[int, str], list[torch.Tensor]]) -> None:
    """Take one step, launch by launch, and note the magnitudes that every projection of every layer reads."""
    local, weights = decoder.local, decoder.weights
    layer = -1
    for op in local.next_ops():
        layer += op.name == "qkv"
        if op.name in SITES:
            norm = {"qkv": "attention_norm", "gate_up": "mlp_norm"}.get(op.name)
            x = {"o": local.buffers.mixed, "down": local.buffers.act}.get(op.name, local.buffers.residual)
            if norm is not None:
                x = x * torch.rsqrt(x.pow(2).mean() + weights.eps) * getattr(weights.layers[layer], norm)
            seen.setdefault((layer, op.name), []).append(x.abs().cpu())
        op.launch()


def check(mode: Mode, r_p: float, r_kv: float, params: Row) -> None:
    """Raise RuntimeError when a mode did not read what it says."""
    wanted = float(params["r_p"]) if mode is Mode.PROJECTION else 1.0
    if abs(r_p - wanted) > (KEEP_TOLERANCE if wanted < 1 else 1e-9):
        raise RuntimeError(f"{mode.value} was to read {wanted} of the channels and read {r_p:.3f}")
    wanted = float(params["r_kv"]) if mode is Mode.KV else 1.0
    entries = int(params["context"])
    if abs(r_kv - wanted) > (int(params["steps"]) + ROOM_STEPS) / entries:
        raise RuntimeError(f"{mode.value} was to read {wanted} of the cache and read {r_kv:.3f}")


if __name__ == "__main__":
    main()
