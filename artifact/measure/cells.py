"""The measuring task that timing claims share: decoders of several modes and contexts, interleaved step by step in
one process.

A request lists groups; the members of a group are alive together and take turns, one step each per round, so that
drift and other load fall on all of them alike. What is compared belongs in one group: step times depend by a percent
or two on which steps run in between. Before any timing one member of every mode takes a step against the
reference; a member whose logits are off, whose counted keep ratios are not the requested ones, or that moved more
bytes than the machine can read is an error.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from artifact.account import K_TOKENS
from artifact.engine.attention_paths import capturable
from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.decoder import Decoder
from artifact.engine.prepare import Prepared, grid, prepare, prepare_synthetic
from artifact.engine.reference import gate_step
from artifact.engine.timing import interleave, profile_ops, release
from artifact.kv.retain import budget
from artifact.kv.snapkv import SnapKV
from artifact.kv.window import Window
from artifact.profiles import Profile
from artifact.shapes import KNOWN, known_shape
from artifact.system import last_level_cache_bytes
from kernels.bandwidth import Bandwidth, read_bandwidth

WARMUP_STEPS = 2
PROFILE_STEPS = 1
EXTRA_STEPS = 1 + WARMUP_STEPS + PROFILE_STEPS  # the gate's step, warm-up, and steps timed launch by launch
# Thresholds are quantiles of other text; single passages of ten tokens were seen to read 46.9% to 52.1% at 50%.
KEEP_TOLERANCE = 0.05
MEASURED_AGAIN = 3
BANDWIDTH_SLACK = 1.15  # reading faster than memory by more than this means that a cache was measured

Row = dict[str, Any]


def member(
    context: int,
    r_p: float = 1.0,
    r_kv: float = 1.0,
    method: str = "snapkv",
    path: str = "splitk",
    part: str = "all",
) -> Row:
    """One decoder of a group: context in tokens, requested keep ratios (1 reads everything), KV method, attention path.

    method: snapkv or window; path: a name of `artifact.engine.attention_paths`; part says what the row is for.
    """
    one = {"context": context, "r_p": r_p, "r_kv": r_kv, "method": method if r_kv < 1 else "none"}
    return {**one, "path": path, "part": part}


def mode_name(r_p: float, r_kv: float) -> str:
    """Name of a mode by what it skips: dense, projection, kv or both."""
    return {(False, False): "dense", (True, False): "projection", (False, True): "kv", (True, True): "both"}[
        (r_p < 1, r_kv < 1)
    ]


def request(
    profile: Profile, groups: list[list[Row]], steps: int, longest: int, note: str = "", order_seed: int = 0
) -> Row:
    """Parameters of one `decode` cell. longest: the context to prefill, the same in all cells of a run so that it is
    shared. note: what was left out of the request and why, copied into every row. order_seed: draws the orders in
    which members take their turns; blocks differ in it.
    """
    return {
        "model": profile.model,
        "device": profile.device,
        "dtype": profile.dtype,
        "text": profile.text,
        "groups": groups,
        "steps": steps,
        "longest": longest,
        "note": note,
        "order_seed": order_seed,
    }


def decode(params: Row) -> Iterator[Row]:
    """Measure every group and yield one row per member: ms of each timed step, what was counted, and the checks'
    results.
    """
    prepared = yield from live(lambda say: prepared_for(params, say))
    device = prepared.weights.device
    rows = []
    for number, group in enumerate(params["groups"]):
        doing = ", ".join(sorted({f"{one['context'] / K_TOKENS:.1f}K" for one in group}))
        yield {"progress": number / len(params["groups"]), "doing": f"decoding at {doing}"}
        measured = measure_group(prepared, group, int(params["steps"]), int(params["order_seed"]))
        rows += [{**row, "group": number} for row in measured]
    bandwidth = read_bandwidth(device)
    for row in rows:
        bandwidth = settled(row, bandwidth, device)
        yield {**row, "read_gbps": bandwidth.median_gbps, "note": params["note"]}


def live(action: Callable[[Callable[[float, str], None]], Prepared]) -> Generator[Row, None, Prepared]:
    """Run `action(say)` in a thread and yield a progress message whenever it says something; return its result."""
    said: queue.SimpleQueue[Row] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            action, lambda share, doing: said.put({"progress": 0.0, "doing": f"{doing}, {share:.0%}"})
        )
        while not running.done():
            try:
                yield said.get(timeout=0.2)
            except queue.Empty:
                continue
    return running.result()


def prepared_for(params: Row, say: Callable[[float, str], None] | None = None) -> Prepared:
    """Prepare what a request needs: a checkpoint with real text, or synthetic tensors for the name of a known model."""
    model, longest, steps = params["model"], int(params["longest"]), int(params["steps"])
    device, dtype = params["device"], getattr(torch, params["dtype"])
    room = longest + steps + EXTRA_STEPS + 1
    if is_name(model):
        return prepare_synthetic(known_shape(model), device, dtype, room)
    return prepare(model, params["text"], room, longest, say, device, dtype, selected_contexts(params))


def selected_contexts(params: Row) -> list[int]:
    """Contexts that a request selects cache entries from: those of its KV members, or those it lists itself."""
    grouped = [int(one["context"]) for group in params["groups"] for one in group if one["r_kv"] < 1]
    return [*grouped, *(int(context) for context in params.get("contexts", ()))]


def measure_group(prepared: Prepared, group: list[Row], steps: int, order_seed: int = 0) -> list[Row]:
    """Build, check, time and count the members of one group; return their rows."""
    selecting = [int(one["context"]) for one in group if one["r_kv"] < 1]
    common = Common(unread_cache(prepared, selecting, steps + EXTRA_STEPS))
    decoders = {str(i): build(prepared, one, steps, common) for i, one in enumerate(group)}
    errors = dict.fromkeys(decoders, 0.0)
    for name in gated(group):
        errors.update(dict.fromkeys(_same_mode(group, group[int(name)]), gate_step(decoders[name])))
    for name, decoder in decoders.items():
        if name not in gated(group):
            decoder.step()
    if prepared.weights.device.type == "cuda":
        for name, decoder in decoders.items():
            if capturable(group[int(name)]["path"]):
                decoder.capture()
    samples = interleave(decoders, steps, WARMUP_STEPS, order_seed)
    rows = []
    for name, decoder in decoders.items():
        one = group[int(name)]
        counted = decoder.counted()
        check_counts(one, counted.r_p, decoder, steps)
        row = {
            **one,
            "mode": mode_name(one["r_p"], one["r_kv"]),
            **samples[name].row(),
            "steps": steps,
            "counted_r_p": counted.r_p,
            "counted_r_kv": counted.r_kv,
            "projection_bytes": counted.projection_bytes,
            "kv_bytes": counted.kv_bytes,
            "head_bytes": counted.head_bytes,
            "gate_error": errors[name],
            "attention_backend": decoder.attention_backend(),
            "ops_ms": profile_ops(decoder, PROFILE_STEPS) if one["part"] != "crossing" else {},
            "capacity": decoder.cache.capacity,
            "llc_bytes": last_level_bytes(prepared.weights.device),
            "working_set_bytes": sum(one.working_set_bytes() for one in decoders.values()),
            "shape": dataclasses.asdict(prepared.weights.shape),
            "weight_bits": 8 * prepared.weights.embedding.element_size(),
            "kv_bits": 8 * decoder.cache.keys.element_size(),
            "text": prepared.text,
            "identity": prepared.weights.identity,
            "threads": torch.get_num_threads(),
        }
        rows.append(row)
    release(decoders)
    return rows


def gated(group: list[Row]) -> list[str]:
    """Which members take their first step against the reference: of every mode and path the one with the longest
    context.
    """
    longest: dict[tuple[Any, ...], int] = {}
    for i, one in enumerate(group):
        key = _mode_key(one)
        if key not in longest or one["context"] > group[longest[key]]["context"]:
            longest[key] = i
    return [str(i) for i in longest.values()]


def _same_mode(group: list[Row], like: Row) -> list[str]:
    return [str(i) for i, one in enumerate(group) if _mode_key(one) == _mode_key(like)]


def _mode_key(one: Row) -> tuple[Any, ...]:
    return one["r_p"], one["r_kv"], one["method"], one["path"]


@dataclass(frozen=True)
class Common:
    """What members of one group share to save memory and time.

    unread: the full cache that KV members append to and never read. selected: caches packed so far, by context, keep
    ratio and method; a second member with the same takes a copy.
    """

    unread: KVCache | None
    selected: dict[tuple[int, float, str], PackedCache] = field(default_factory=dict)


def unread_cache(prepared: Prepared, contexts: Sequence[int], room: int) -> KVCache | None:
    """The full cache that KV members at these contexts append to and never read; None without any, and where caches
    are shared anyway.
    """
    if prepared.synthetic or not contexts:
        return None
    return prepared.cache.fork(max(contexts), max(contexts) + room)


def build(prepared: Prepared, one: Row, steps: int, common: Common | None = None) -> Decoder:
    """Build the decoder of one member, on caches of its own but for what `common` lends to a group that has not
    stepped yet.

    Whatever its context, a member goes on with the same passage: the text after the longest prefill. Channels kept
    depend on the tokens decoded, and different passages at different contexts would tilt the very curves that are
    compared.
    """
    context, room = int(one["context"]), steps + EXTRA_STEPS
    source = prepared.cache
    if prepared.synthetic:
        cache = source.share(context)
    else:
        lent = common.unread if common is not None and one["r_kv"] < 1 else None
        cache = source.fork(context, context + room) if lent is None else lent.share(context)
    thresholds = prepared.calibration.thresholds(one["r_p"]) if one["r_p"] < 1 else None
    packed = _retained(prepared, one, cache, room, {} if common is None else common.selected)
    passage = prepared.tokens[source.tokens : source.tokens + room + 1]
    tokens = torch.cat((prepared.tokens[:context], passage))
    return Decoder(prepared.weights, cache, tokens, thresholds, packed, path=one["path"])


def _retained(
    prepared: Prepared, one: Row, cache: KVCache, room: int, selected: dict[tuple[int, float, str], PackedCache]
) -> PackedCache | None:
    """Select what the KV method of a member retains, or copy what was selected for another one; None without a
    method.
    """
    if one["r_kv"] == 1:
        return None
    context, method = int(one["context"]), str(one["method"])
    key = (context, float(one["r_kv"]), method)
    if key in selected:
        return selected[key].fork()
    if method == "snapkv":
        packed = SnapKV().select(cache, prepared.queries[grid(context)], one["r_kv"], prepared.scale(), room)
    else:
        packed = Window().select(cache, one["r_kv"], room)
    return selected.setdefault(key, packed)


def check_counts(one: Row, counted_r_p: float, decoder: Decoder, steps: int) -> None:
    """Raise RuntimeError when a mode did not read what it says: thresholds ignored, ratio ignored, silently dense."""
    if one["r_p"] < 1 and abs(counted_r_p - one["r_p"]) > KEEP_TOLERANCE:
        raise RuntimeError(f"projection keep {one['r_p']} was asked for, {counted_r_p:.3f} was read")
    if one["r_p"] == 1 and counted_r_p != 1:
        raise RuntimeError(f"a dense projection read {counted_r_p:.3f} of its weights")
    kept = budget(int(one["context"]), one["r_kv"])
    expected = kept + 1 + WARMUP_STEPS + steps
    if int(decoder.attended.min()) != expected or int(decoder.attended.max()) != expected:
        raise RuntimeError(f"{expected} cache entries were expected per head, {int(decoder.attended.max())} are there")


def settled(row: Row, bandwidth: Bandwidth, device: torch.device) -> Bandwidth:
    """Check a row and return the bandwidth that it was checked against.

    A row that beat memory as measured so far is no error yet: other work may have slowed that measurement down, so
    memory is measured again before the row is refused.
    """
    for _ in range(MEASURED_AGAIN):
        if _plausible(row, bandwidth):
            break
        bandwidth = bandwidth.best(read_bandwidth(device))
    check_bandwidth(row, bandwidth)
    return bandwidth


def check_bandwidth(row: Row, bandwidth: Bandwidth) -> None:
    """Raise RuntimeError when the median step beat memory: then a broken clock or work left undone was measured."""
    if not _plausible(row, bandwidth):
        where = f"{row['mode']} at {row['context']} tokens"
        reached = _reached_gbps(row)
        raise RuntimeError(f"{where} moved {reached:.1f} GB/s where memory reads {bandwidth.fastest_gbps:.1f}")


def _plausible(row: Row, bandwidth: Bandwidth) -> bool:
    reached = _reached_gbps(row)
    return math.isfinite(reached) and reached <= BANDWIDTH_SLACK * bandwidth.fastest_gbps


def _reached_gbps(row: Row) -> float:
    """GB/s from memory: a last-level cache can serve at most its own size of what a step reads."""
    step_bytes = row["projection_bytes"] + row["kv_bytes"] + row["head_bytes"]
    from_memory = max(0.0, step_bytes - row["llc_bytes"])
    median_ms = statistics.median(row["ms"])
    return float(from_memory / median_ms / 1e6) if median_ms > 0 else math.inf


def last_level_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache in front of the memory that `device` decodes from; 0 when the system does not
    say.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return last_level_cache_bytes() or 0


def is_name(model: str) -> bool:
    """Whether `model` names known dimensions (synthetic weights) rather than a checkpoint."""
    return model.lower() in KNOWN
