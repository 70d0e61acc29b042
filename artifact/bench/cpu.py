"""`artifact bench kernels` on a CPU: every kernel and the whole step against the read bandwidth of the same run and
threads.

All layers take part, and before every pass a buffer larger than any last-level cache is read, so that no kernel is
measured on data that an earlier pass left in a cache. Peers are torch's own matrix-vector product and attention, and
the `generate` of transformers on the same model, dtype and threads.

    artifact bench kernels [--context 4096] [--json]
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict

import click
import torch
from tabulate import tabulate

from artifact.bench.cpu_lines import REPEATS, Bench, Line, timed
from artifact.bench.cpu_projections import KEEP, projection_lines
from artifact.engine import models
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.kv.window import Window
from artifact.projection import teal
from artifact.shapes import Shape
from kernels import Launch, attention, in_order

TARGETS = {"attention": 0.75, "step": 0.80}


def attention_lines(bench: Bench, shape: Shape, contexts: list[int]) -> Iterator[Line]:
    """Decode attention over caches of every layer at several contexts, against torch's fused attention."""
    query = torch.randn(shape.heads, shape.head_dim)
    out = torch.empty(shape.heads * shape.head_dim)
    scale = shape.head_dim**-0.5
    for context in contexts:
        size = (shape.kv_heads, context, shape.head_dim)
        caches = [(torch.randn(size), torch.randn(size)) for _ in range(shape.layers)]
        lengths = torch.full((shape.kv_heads,), context - 1, dtype=torch.int32)
        ours = [attention.bind(query, k, v, lengths, out, scale) for k, v in caches]

        def fused(k: torch.Tensor, v: torch.Tensor) -> Launch:
            q = query[None, :, None]
            return lambda: torch.nn.functional.scaled_dot_product_attention(q, k[None], v[None], enable_gqa=True)

        target = TARGETS["attention"] if context >= 4096 else None
        moved = sum(attention.bytes_moved(k, lengths) for k, _ in caches)
        peer = ("torch SDPA", in_order([fused(k, v) for k, v in caches]))
        yield bench.line(f"attention at {context}", target, in_order(ours), functools.partial(float, moved), peer)


def step_lines(bench: Bench, weights: Weights, context: int) -> Iterator[Line]:
    """Whole decode steps in the four modes against their byte time."""
    cache = KVCache.allocate(weights.shape, context, "cpu", torch.float32)
    cache.keys.normal_()
    cache.values.normal_()
    cache.set_tokens(context)
    room = REPEATS + 2
    tokens = torch.randint(weights.shape.vocab, (context + room + 1,))
    thresholds = teal.calibrate(weights, tokens[:256]).thresholds(KEEP)
    decoders = {}
    for name, limits, keep in (
        ("dense", None, 1.0),
        ("projection", thresholds, 1.0),
        ("kv", None, 0.3),
        ("both", thresholds, 0.3),
    ):
        own = cache.fork(context, context + room)
        packed = Window().select(own, keep, room) if keep < 1 else None
        decoders[name] = Decoder(weights, own, tokens.clone(), limits, packed)
    for name, decoder in decoders.items():
        decoder.check_room(REPEATS + 1)

        def step_bytes(decoder: Decoder = decoder) -> float:
            return decoder.counted().step_bytes

        target = TARGETS["step"] if name == "dense" else None
        yield bench.line(f"{name} step at {context}", target, decoder.step, step_bytes)


class _Stamps:
    """A streamer for transformers' `generate` that notes when each token arrives."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: object) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""


def generate_line(model: str, weights: Weights, bench: Bench, prompt: int, tokens: int = 24) -> Line:
    """Our greedy decoding against transformers' `generate`: ms per token after the prompt, same weights, dtype and
    threads.

    Ours runs before and after the peer, so that drift of the machine favours neither.
    """
    import transformers

    from artifact.engine.checkpoints import open_checkpoint
    from artifact.engine.prefill import prefill

    peer = transformers.AutoModelForCausalLM.from_pretrained(str(open_checkpoint(model).folder), dtype=torch.float32)
    ids = torch.randint(100, weights.shape.vocab, (prompt,))
    cache = prefill(weights, ids, capacity=prompt + tokens + 2).cache
    buffer = torch.cat((ids, torch.zeros(tokens + 2, dtype=torch.int64)))
    decoder = Decoder(weights, cache, buffer, greedy=True)

    def ours() -> list[float]:
        cache.set_tokens(prompt - 1)
        decoder.step()
        decoder.reset_counts()
        return [timed(decoder.step) for _ in range(tokens)]

    before = bench.read()
    samples = ours()
    stamps = _Stamps()
    with torch.inference_mode():
        mask = torch.ones_like(ids[None])
        peer.generate(
            ids[None],
            attention_mask=mask,
            max_new_tokens=tokens + 2,
            min_new_tokens=tokens + 2,
            do_sample=False,
            streamer=stamps,
        )
    # The first stamp is the prompt's, the second follows the prefill; steps lie between the later ones.
    theirs = [(b - a) * 1e3 for a, b in itertools.pairwise(stamps.at[1:])]
    ms = statistics.median(samples + ours())
    moved = decoder.counted().step_bytes
    gbps = moved / ms / 1e6
    name = f"greedy decoding after {prompt}"
    peer_ms = statistics.median(theirs)
    return Line(name, moved / 1e6, ms, gbps, gbps / before, None, "transformers generate", peer_ms)


def _table(lines: list[Line], read_gbps: list[float]) -> str:
    rows = [
        [
            line.name,
            f"{line.bytes_mb:.1f}",
            f"{line.ms:.2f}",
            f"{line.gbps:.1f}",
            f"{line.share:.0%}",
            "" if line.target is None else f">= {line.target:.0%}",
            "" if line.peer_ms is None else f"{line.peer_ms / line.ms:.2f}x {line.peer}",
        ]
        for line in lines
    ]
    head = ["operation, all layers", "MB moved", "ms", "GB/s", "of read bandwidth", "target", "faster than"]
    threads = torch.get_num_threads()
    low, _, high = statistics.quantiles(read_gbps, n=4)
    middle = statistics.median(read_gbps)
    title = f"read bandwidth {middle:.1f} GB/s (quartiles {low:.1f}, {high:.1f}), {threads} threads"
    return f"{title}\n\n{tabulate(rows, head, stralign='right')}"


@click.command("kernels", epilog="--device cpu or cuda, given first, takes another than this machine's.")
@click.option("--model", default=None, help="Checkpoint to take weights from; the embedded model when left out.")
@click.option("--context", default=4096, show_default=True, help="Context of the whole-step lines, in tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(model: str | None, context: int, as_json: bool) -> None:
    """Measure CPU kernels and whole steps against this machine's read bandwidth."""
    from artifact import embedded

    source = model or str(embedded.path())
    weights = models.load(source)
    if not 256 <= context <= weights.shape.window - REPEATS - 2:
        raise click.BadParameter(f"{context} is not between 256 and the model's window", param_hint="--context")
    torch.manual_seed(0)  # random caches and tokens decide what thresholds keep
    bench = Bench()
    lines = [*projection_lines(bench, weights), *attention_lines(bench, weights.shape, [1024, 4096, 8192])]
    lines += [*step_lines(bench, weights, context), generate_line(source, weights, bench, context)]
    if as_json:
        click.echo(json.dumps({"read_gbps": bench.read_gbps, "lines": [asdict(one) for one in lines]}))
        return
    click.echo(_table(lines, bench.read_gbps))
