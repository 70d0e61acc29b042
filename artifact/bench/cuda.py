"""`artifact bench kernels` on a GPU: every kernel and whole steps against the read bandwidth of the same run.

Weights are synthetic, distinct for every layer, so that a pass over the layers reads far more than any cache holds.
Each
line is one CUDA graph of all layers, timed by events; peers run in the same process on the same tensors: cuBLAS, cuDNN
and, where installed, flash-attn. A ratio is time over (bytes that must be read / read bandwidth).

    artifact bench kernels [--model llama-3.1-8b] [--json]
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import click
import torch
from tabulate import tabulate

from artifact.shapes import Shape
from kernels import Launch
from kernels.cuda import attention, bandwidth, gate_up, gemv, sparse_gemv, token
from kernels.norm import Norm
from kernels.selection import Selection
from kernels.sparse_gemv import bytes_moved

KEEP = 0.5
KV_KEEP = 0.3
CONTEXTS = (2048, 8192, 32768, 131072)
BUFFER_BYTES = 4 << 30
ROOM = 256
Steps = list[Launch]


@dataclass(frozen=True)
class Line:
    """One measured line over all layers. floor_ms: bytes over read bandwidth; peers: name -> ms of the library."""

    name: str
    bytes_mb: float
    ms: float
    floor_ms: float
    peers: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.ms / self.floor_ms


def timed(launches: Steps, before: Callable[[], object] | None = None, repeats: int = 11, replays: int = 3) -> float:
    """Return the median ms of one pass over the launches, captured in a CUDA graph; `before` runs ahead of each
    sample.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    samples = []
    for _ in range(repeats):
        if before is not None:
            before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / replays)
    return statistics.median(samples)


def noise(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return normal noise on the GPU, drawn in pieces so that no float32 copy of a large tensor exists."""
    out = torch.empty(*size, dtype=dtype, device="cuda")
    for piece in out.view(-1).split(1 << 28):
        piece.normal_(0, scale)
    return out


class Model:
    """Synthetic weights of one shape in both layouts, the vectors of a step, and its launches."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.sizes = {
            "qkv": (q + 2 * kv, shape.hidden),
            "o": (shape.hidden, q),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }
        self.segments = {
            "qkv": (0, q, q + kv, q + 2 * kv),
            "o": (0, shape.hidden),
            "gate_up": (0, shape.intermediate, 2 * shape.intermediate),
            "down": (0, shape.hidden),
        }
        layers = range(shape.layers)
        self.w = {site: [noise(*size, scale=0.02) for _ in layers] for site, size in self.sizes.items()}
        self.w_in = {site: [w.t().contiguous() for w in ws] for site, ws in self.w.items()}
        self.residual, self.mixed = noise(shape.hidden, dtype=torch.float32), noise(q, dtype=torch.float32)
        self.qkv, self.act = noise(q + 2 * kv, dtype=torch.float32), noise(shape.intermediate, dtype=torch.float32)
        self.norm = Norm(torch.ones(shape.hidden, device="cuda"), 1e-5)
        self.selections = [{site: self._selection(site) for site in self.sizes} for _ in layers]

    def _selection(self, site: str) -> Selection:
        count = len(self.segments[site]) - 1
        kept = torch.zeros(count, dtype=torch.int32, device="cuda")
        return Selection(torch.zeros(count, device="cuda"), self.segments[site], kept)

    def source(self, site: str) -> torch.Tensor:
        """Return the vector a projection reads."""
        return {"qkv": self.residual, "o": self.mixed, "gate_up": self.residual, "down": self.act}[site]

    def set_threshold(self, layer: int, site: str) -> None:
        """Set a layer's thresholds to the quantile of the vector that is there now, so that KEEP of it is read."""
        x = self.source(site)
        if site in ("qkv", "gate_up"):
            x = x * torch.rsqrt(x.pow(2).mean() + self.norm.eps) * self.norm.weight
        self.selections[layer][site].thresholds.fill_(float(x.abs().quantile(1 - KEEP)))

    def project(self, layer: int, site: str, sparse: bool) -> Launch:
        """Return one projection as a step runs it: norms applied on reading, residual added on writing."""
        x = self.source(site)
        select = self.selections[layer][site]
        w, w_in = self.w[site][layer], self.w_in[site][layer]
        if site == "gate_up":
            if sparse:
                return gate_up.bind_sparse(x, w_in, self.act, select, norm=self.norm)
            return gate_up.bind(x, w, self.act, norm=self.norm)
        y, norm = (self.qkv, self.norm) if site == "qkv" else (self.residual, None)
        if sparse:
            return sparse_gemv.bind(x, w_in, y, select, norm=norm, accumulate=site != "qkv")
        return gemv.bind(x, w, y, norm=norm, accumulate=site != "qkv")

    def layer_bytes(self, site: str) -> int:
        rows, depth = self.sizes[site]
        return 2 * rows * depth

    def kept_bytes(self, site: str) -> int:
        """Return the bytes the last sparse pass over all layers read, as counted by the kernels."""
        total = 0
        for layer, selections in enumerate(self.selections):
            total += bytes_moved(self.w_in[site][layer], selections[site])
        return total


def check(model: Model, site: str, sparse: bool, tolerance: float = 1e-4) -> None:
    """Raise RuntimeError unless layer 0's projection equals its float64 reference: a wrong kernel is not timed."""
    x = model.source(site).double()
    if site in ("qkv", "gate_up"):
        x = x * torch.rsqrt(x.pow(2).mean() + model.norm.eps) * model.norm.weight.double()
    w = model.w_in[site][0].double()
    segments = model.segments[site]
    pieces = []
    for s, limit in enumerate(model.selections[0][site].thresholds):
        kept = torch.where(x.abs() > limit, x, torch.zeros_like(x)) if sparse else x
        pieces.append(kept @ w[:, segments[s] : segments[s + 1]])
    expected = torch.cat(pieces)
    if site == "gate_up":
        gate, up = expected.chunk(2)
        expected = torch.nn.functional.silu(gate) * up
    if site in ("o", "down"):
        model.residual.zero_()
    model.project(0, site, sparse)()
    got = {"qkv": model.qkv, "o": model.residual, "gate_up": model.act, "down": model.residual}[site]
    error = float((got.double() - expected).norm() / expected.norm())
    if not error < tolerance:
        raise RuntimeError(f"{'sparse' if sparse else 'dense'} {site} is off by {error:.1e} from its float64 reference")


def projection_lines(model: Model, gbps: float) -> Iterator[Line]:
    """The four fused projections, dense and at KEEP, selection, norm and residual included; and their sums."""
    layers = range(model.shape.layers)
    sums: dict[bool, list[Line]] = {False: [], True: []}
    for sparse in (False, True):
        for site in model.sizes:
            model.residual.normal_()
            model.mixed.normal_()
            model.act.normal_()
            peers = {}
            for layer in layers:
                model.set_threshold(layer, site)
            if not sparse:
                x = model.source(site).half()
                y = torch.empty(model.sizes[site][0], dtype=torch.float16, device="cuda")
                peers["cuBLAS"] = timed([functools.partial(torch.mv, w, x, out=y) for w in model.w[site]])
            check(model, site, sparse)
            launches = [model.project(layer, site, sparse) for layer in layers]
            ms = timed(launches)
            moved = model.kept_bytes(site) if sparse else model.layer_bytes(site) * len(layers)
            line = Line(f"{'sparse' if sparse else 'dense'} {site}", moved / 1e6, ms, moved / gbps / 1e6, peers)
            sums[sparse].append(line)
            yield line
        every = sums[sparse]
        peers = {} if sparse else {"cuBLAS": sum(line.peers["cuBLAS"] for line in every)}
        total, floor = sum(line.ms for line in every), sum(line.floor_ms for line in every)
        yield Line(f"{'sparse' if sparse else 'dense'}, all four", sum(o.bytes_mb for o in every), total, floor, peers)


def _flash_attn() -> Callable[..., torch.Tensor] | None:
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    return flash_attn_with_kvcache


def attention_lines(shape: Shape, gbps: float) -> Iterator[Line]:
    """Rotation, append and split-K attention in one launch, against the libraries' attention alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, kv, d = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.head_dim
    qkv, out = noise(q + 2 * kv, dtype=torch.float32), torch.empty(q, device="cuda")
    inv_freq = 5e5 ** -(torch.arange(d // 2, device="cuda") / (d // 2))
    flash = _flash_attn()
    query = qkv[:q].view(1, shape.heads, 1, d).half()
    for context in CONTEXTS:
        count = max(4, min(shape.layers, (2 << 30) // (4 * kv * context)))
        caches = [(noise(shape.kv_heads, context, d), noise(shape.kv_heads, context, d)) for _ in range(count)]
        position = torch.full((1,), context - 1, dtype=torch.int32, device="cuda")
        lengths = torch.full((shape.kv_heads,), context - 1, dtype=torch.int32, device="cuda")
        ours = [attention.bind_step(qkv, inv_freq, position, c, None, lengths, out, d**-0.5) for c in caches]
        peers = {}

        def cudnn(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return torch.nn.functional.scaled_dot_product_attention(query, k[None], v[None], enable_gqa=True)

        peers["cuDNN"] = timed([functools.partial(cudnn, k, v) for k, v in caches]) / count
        if flash is not None:
            exact = [tuple(t.transpose(0, 1)[None].contiguous() for t in cache) for cache in caches]
            peers["flash-attn"] = timed([functools.partial(flash, query.transpose(1, 2), *c) for c in exact]) / count
        moved = 4 * kv * context
        yield Line(f"attention at {context}", moved / 1e6, timed(ours) / count, moved / gbps / 1e6, peers)


def step_lines(model: Model, gbps: float) -> Iterator[Line]:
    """Whole decode steps of five launches a layer in four modes; `peers` holds the dense step of the same context."""
    shape = model.shape
    capacity, short = CONTEXTS[-1] + ROOM, int(KV_KEEP * CONTEXTS[-1]) + ROOM
    full = [tuple(noise(shape.kv_heads, capacity, shape.head_dim) for _ in range(2)) for _ in range(shape.layers)]
    packed = [tuple(noise(shape.kv_heads, short, shape.head_dim) for _ in range(2)) for _ in range(shape.layers)]
    table, head = noise(shape.vocab, shape.hidden), noise(shape.vocab, shape.hidden, scale=0.02)
    logits, tokens = torch.empty(shape.vocab, device="cuda"), torch.ones(capacity + 1, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int32, device="cuda")
    lengths, kept_lengths = (torch.zeros(shape.kv_heads, dtype=torch.int32, device="cuda") for _ in range(2))
    read = torch.zeros(shape.kv_heads, dtype=torch.int64, device="cuda")
    inv_freq = 5e5 ** -(torch.arange(shape.head_dim // 2, device="cuda") / (shape.head_dim // 2))

    def attend(layer: int, kv: bool) -> Launch:
        keys, values = packed[layer]
        live = kept_lengths if kv else lengths
        own = (keys, values, kept_lengths) if kv else None
        scale = shape.head_dim**-0.5
        cache = (full[layer][0], full[layer][1])
        return attention.bind_step(model.qkv, inv_freq, position, cache, own, live, model.mixed, scale)

    def build(projection: bool, kv: bool) -> Steps:
        steps: Steps = [token.bind_embed(tokens, position, table, model.residual)]
        for layer in range(shape.layers):
            steps += [model.project(layer, "qkv", projection), attend(layer, kv)]
            steps += [model.project(layer, site, projection) for site in ("o", "gate_up", "down")]
        steps.append(gemv.bind(model.residual, head, logits, norm=model.norm))
        steps.append(token.bind_argmax(logits, tokens, position))
        steps.append(token.bind_advance(position, [lengths, kept_lengths], (lengths, read), None))
        return steps

    for context in (CONTEXTS[0], CONTEXTS[-1]):

        def place(context: int = context) -> None:
            position.fill_(context)
            lengths.fill_(context)
            kept_lengths.fill_(int(KV_KEEP * context))

        place()
        calibrate(model, build(False, False))
        dense_ms = 0.0
        for name, projection, kv in (("dense", 0, 0), ("projection", 1, 0), ("kv", 0, 1), ("both", 1, 1)):
            ms = timed(build(bool(projection), bool(kv)), place)
            dense_ms = dense_ms or ms
            weights = sum(
                model.kept_bytes(s) if projection else model.layer_bytes(s) * shape.layers for s in model.sizes
            )
            cache = 4 * shape.layers * shape.kv_heads * shape.head_dim * (int(KV_KEEP * context) if kv else context)
            moved = weights + cache + 2 * shape.vocab * shape.hidden
            yield Line(f"{name} step at {context}", moved / 1e6, ms, moved / gbps / 1e6, {"our dense": dense_ms})


def calibrate(model: Model, steps: Steps) -> None:
    """Run one dense step launch by launch and set every threshold from the vector its projection is about to read."""
    launches = iter(steps)
    next(launches)()
    for layer in range(model.shape.layers):
        model.set_threshold(layer, "qkv")
        next(launches)()
        next(launches)()
        for site in ("o", "gate_up", "down"):
            model.set_threshold(layer, site)
            next(launches)()


@click.command("kernels", epilog="--device cpu or cuda, given first, takes another than this machine's.")
@click.option("--model", default="llama-3.1-8b", show_default=True, help="Shape to measure; weights are synthetic.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(model: str, as_json: bool) -> None:
    """Measure GPU kernels and whole steps against this GPU's read bandwidth."""
    from artifact import shapes

    buffer = bandwidth.make_buffer(BUFFER_BYTES // 4)
    gbps = max(buffer.numel() * 4 / timed([read]) / 1e6 for read in bandwidth.bind_reads(buffer))
    del buffer
    shape = shapes.known_shape(model)
    lines = list(attention_lines(shape, gbps))
    torch.cuda.empty_cache()
    built = Model(shape)
    lines += [*projection_lines(built, gbps), *step_lines(built, gbps)]
    if as_json:
        click.echo(json.dumps({"read_gbps": gbps, "lines": [asdict(line) | {"ratio": line.ratio} for line in lines]}))
        return
    rows = [
        [
            line.name,
            f"{line.bytes_mb:.0f}",
            f"{line.ms:.4f}",
            f"{line.floor_ms:.4f}",
            f"{line.ratio:.3f}",
            ", ".join(f"{ms / line.ms:.3f}x {peer}" for peer, ms in line.peers.items()),
        ]
        for line in lines
    ]
    click.echo(f"{torch.cuda.get_device_name()}, read bandwidth {gbps:.0f} GB/s, {shape.name}\n")
    click.echo(tabulate(rows, ["all layers", "MB", "ms", "floor ms", "ratio", "faster than"], stralign="right"))
