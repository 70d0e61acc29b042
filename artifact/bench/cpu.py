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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import click
import torch
from tabulate import tabulate

from artifact import models
from artifact.cache import KVCache
from artifact.decoder import Decoder
from artifact.kv.window import Window
from artifact.models import Layer, Matrix, Weights
from artifact.projection import teal
from artifact.shapes import Shape
from kernels import Launch, attention, gate_up, gemv, sparse_gemv
from kernels.cpu.bandwidth import bind_reads, make_buffer
from kernels.selection import Selection

KEEP = 0.5
REPEATS = 9
BUFFER_BYTES = 1 << 30
TARGETS = {"dense": 0.85, "sparse": 0.85, "attention": 0.75, "step": 0.80}


@dataclass(frozen=True)
class Line:
    """One measured line. bytes_mb: decimal MB moved per pass; share: of the read bandwidth; peer_ms: the library's
    time.
    """

    name: str
    bytes_mb: float
    ms: float
    gbps: float
    share: float
    target: float | None
    peer: str = ""
    peer_ms: float | None = None


class Bench:
    """Lines of one run. Before every pass a large buffer is read: that empties the caches and measures the read
    bandwidth.

    A share of bandwidth is the median over passes of (GB/s of the pass) / (GB/s of the read just before it): the
    bandwidth of a shared machine drifts by tens of percent within a run, and only neighbours in time compare.
    """

    def __init__(self) -> None:
        self.buffer = make_buffer(BUFFER_BYTES // 4)
        reads = bind_reads(self.buffer)
        medians = [statistics.median(_timed(read) for _ in range(4)) for read in reads]
        self._read = reads[medians.index(min(medians))]
        self.read_gbps: list[float] = []

    def read(self) -> float:
        """Read the buffer; return GB/s."""
        gbps = BUFFER_BYTES / _timed(self._read) / 1e6
        self.read_gbps.append(gbps)
        return gbps

    def line(
        self,
        name: str,
        target: float | None,
        run: Launch,
        moved: Callable[[], float],
        peer: tuple[str, Launch] | None = None,
    ) -> Line:
        """Time `run` over REPEATS cold passes, its peer in turn; `moved` returns the bytes of the last pass."""
        run()
        ours, shares, theirs = [], [], []
        for _ in range(REPEATS):
            before = self.read()
            ours.append(_timed(run))
            shares.append(moved() / ours[-1] / 1e6 / before)
            if peer is not None:
                self.read()
                theirs.append(_timed(peer[1]))
        ms, share, size = statistics.median(ours), statistics.median(shares), moved()
        label, peer_ms = ("", None) if peer is None else (peer[0], statistics.median(theirs))
        return Line(name, size / 1e6, ms, size / ms / 1e6, share, target, label, peer_ms)


def _timed(run: Launch) -> float:
    """Return the ms of one call."""
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def projection_lines(bench: Bench, weights: Weights) -> Iterator[Line]:
    """Dense and sparse lines of the four fused projections over all layers."""
    shape = weights.shape
    sites: dict[str, tuple[Callable[[Layer], Matrix], tuple[int, ...]]] = {
        "qkv": (lambda layer: layer.qkv, (0, weights.layers[0].qkv.w.shape[0])),
        "o": (lambda layer: layer.o, (0, shape.hidden)),
        "gate_up": (lambda layer: layer.gate_up, (0, shape.intermediate, 2 * shape.intermediate)),
        "down": (lambda layer: layer.down, (0, shape.hidden)),
    }
    for site, (matrix_of, segments) in sites.items():
        matrices = [matrix_of(layer) for layer in weights.layers]
        x = torch.randn(matrices[0].w.shape[1])
        y = torch.empty(matrices[0].w.shape[0])
        act = torch.empty(shape.intermediate)
        threshold = torch.full((len(segments) - 1,), float(x.abs().quantile(1 - KEEP)))
        selections = [
            Selection(threshold, segments, torch.zeros(len(segments) - 1, dtype=torch.int32)) for _ in matrices
        ]
        if site == "gate_up":
            dense = [gate_up.bind(x, m.w, act) for m in matrices]
            sparse = [gate_up.bind_sparse(x, m.w_in, act, s) for m, s in zip(matrices, selections, strict=True)]
        else:
            dense = [gemv.bind(x, m.w, y) for m in matrices]
            sparse = [sparse_gemv.bind(x, m.w_in, y, s) for m, s in zip(matrices, selections, strict=True)]
        moved = sum(gemv.bytes_moved(m.w) for m in matrices)
        peer: list[Launch] = [functools.partial(torch.mv, m.w, x, out=y) for m in matrices]
        yield bench.line(
            f"dense {site}", TARGETS["dense"], _all(dense), functools.partial(float, moved), ("torch.mv", _all(peer))
        )
        pairs = list(zip(matrices, selections, strict=True))

        def read(pairs: list[tuple[Matrix, Selection]] = pairs) -> float:
            return sum(sparse_gemv.bytes_moved(m.w_in, s) for m, s in pairs)

        yield bench.line(f"sparse {site} at {KEEP:.0%}", TARGETS["sparse"], _all(sparse), read)


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

        moved = sum(attention.bytes_moved(k, lengths) for k, _ in caches)
        peer = ("torch SDPA", _all([fused(k, v) for k, v in caches]))
        yield bench.line(
            f"attention at {context}", TARGETS["attention"], _all(ours), functools.partial(float, moved), peer
        )


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

    from artifact.checkpoints import open_checkpoint
    from artifact.prefill import prefill

    peer = transformers.AutoModelForCausalLM.from_pretrained(str(open_checkpoint(model).folder), dtype=torch.float32)
    ids = torch.randint(100, weights.shape.vocab, (prompt,))
    cache = prefill(weights, ids, capacity=prompt + tokens + 2).cache
    buffer = torch.cat((ids, torch.zeros(tokens + 2, dtype=torch.int64)))
    decoder = Decoder(weights, cache, buffer, greedy=True)

    def ours() -> list[float]:
        cache.set_tokens(prompt - 1)
        decoder.step()
        decoder.reset_counts()
        return [_timed(decoder.step) for _ in range(tokens)]

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


def _all(launches: list[Launch]) -> Launch:
    def run() -> None:
        for launch in launches:
            launch()

    return run


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


@click.command("kernels")
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
    bench = Bench()
    lines = [*projection_lines(bench, weights), *attention_lines(bench, weights.shape, [1024, 4096, 8192])]
    lines += [*step_lines(bench, weights, context), generate_line(source, weights, bench, context)]
    if as_json:
        click.echo(json.dumps({"read_gbps": bench.read_gbps, "lines": [asdict(one) for one in lines]}))
        return
    click.echo(_table(lines, bench.read_gbps))
