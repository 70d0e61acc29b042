"""CateKV's cache is as much smaller as its entries say, and its steps are faster (CateKV, section 4, Efficiency).

The paper: about 41% of the cache is kept at 128K; memory shrinks up to 2.72x and a decode step takes 2.18x less time on
one A100, throughput rises 3.96x. One operating point is measured here, r = 0.4 and eta = 1: what its cache holds, and
dense steps against its steps, one after the other, from the ragged cache alone; then batches of both, each with as many
sequences as one memory budget holds. Its own memory bound is 2.44x and its
byte bound at 128K 1.46x, so the headline figures belong to other points or to a dense baseline that reads more slowly;
the eta of 2.72x is computed and printed.

    python claims/catekv_efficiency.py [--quick]
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.account import Setting, head_bytes, projection_bytes
from artifact.claim import Claim, Finding, Predicate, find, left_out, not_run, run_as_script
from artifact.judge import equal_memory, which_sparsity
from artifact.keep_ratio import headwise_r_kv
from artifact.profiles import NAMES, Profile
from artifact.shapes import Shape, known_shape
from artifact.stats import Region, block_interval, exact_interval
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.measure.equal_plan import Equal
    from artifact.records import Run

NAME = "catekv_efficiency"
PAPER = figures("catekv")
EVERYWHERE = frozenset(NAMES)
SHARE, ETA, BUDGET_TOKENS, LONG_TOKENS = 0.4, 1.0, 2048, 131072
A100_BYTES = 80e9
BLOCKS, QUICK_BLOCKS = 7, 3
STEPS, QUICK_STEPS = 12, 8
# Batched steps: 80 GB at 128K on a GPU; elsewhere what three dense caches take at a context where a block is seconds.
BATCH_STEPS, QUICK_BATCH_STEPS = 12, 6
SMALL_BATCH, SMALL_TOKENS, SMALL_STEPS = 3, 2048, 6
GRID_ROOM = 256  # tokens of a prefill behind the context, which its sequence overwrites
LENGTHS = {"gpu": LONG_TOKENS, "paper": LONG_TOKENS - 4096}

CLAIM = Claim(
    name=NAME,
    title="CateKV's cache and steps shrink by what its entries say",
    paper="catekv",
    place="section 4, Efficiency",
    needs="a model; 5 GB of memory (embedded) or a CUDA GPU (gpu: 140 GB for both batches of 80 GB at 128K)",
    minutes={"embedded": "3 (quick: 1)", "gpu": "3", "paper": "25"},
    tables=("catekv_efficiency", "which_sparsity"),
    predicates=(
        Predicate(
            "kept share at 128K",
            "share of the cache kept with r = 0.4, eta = 1 and 2,048 tokens for consistent heads",
            "section 4, Benchmark results",
            Region(PAPER["share.128k"].low, PAPER["share.128k"].high, "what rounds to the printed 41", "%"),
            EVERYWHERE,
            "approximately 41%",
        ),
        Predicate(
            "eta of the headline",
            "retention ratio of adaptive heads at which the cache is 2.72 times smaller at 128K",
            "section 4, Efficiency",
            Region(0.85, 0.95, "below 1: the headline is another operating point than that of the accuracy tables"),
            EVERYWHERE,
            f"{PAPER['memory.llama'].printed}x",
        ),
        Predicate(
            "entries kept",
            "entries that the cache holds over those of the exact number of adaptive and consistent heads",
            "section 3, cache policy",
            Region(1.0, 1.0, "counted from the cache itself; nothing may be missing or left over", "x"),
            EVERYWHERE,
        ),
        Predicate(
            "memory",
            "bytes of the dense cache over those allocated, as a share of what the entries alone give",
            "section 4, Efficiency",
            Region(0.95, 1.0, "offsets, lengths and room for the run's own tokens are all that may come on top"),
            EVERYWHERE,
            f"up to {PAPER['memory.llama'].printed}x",
        ),
        Predicate(
            "decode step",
            "time of a dense step over that of a CateKV step at the longest context",
            "section 4, Efficiency",
            Region(
                1.0, None, "faster at all; the size of the gain belongs to the machine, its byte bound is printed", "x"
            ),
            EVERYWHERE,
            f"{PAPER['latency.llama'].printed}x on A100",
        ),
        Predicate(
            "throughput at equal memory",
            "tokens per second of CateKV over dense decoding, each with the largest batch that one memory budget holds",
            "section 4, Efficiency",
            Region(1.0, None, "more at all: a larger batch shares each weight; the byte bound is printed beside", "x"),
            EVERYWHERE,
            f"{PAPER['throughput.generic'].printed}x, {PAPER['throughput.best'].printed}x after more compression",
        ),
        Predicate(
            "throughput within its bytes",
            "the same as a share of its byte bound",
            "section 4, Efficiency",
            Region(None, 1.05, "above it only as far as weights are read more slowly than caches: at a third, 5%", "x"),
            EVERYWHERE,
        ),
    ),
)


def measure(run: Run) -> None:
    """The exact figures, then one process per block with dense and CateKV steps at the longest context."""
    from artifact.measure.cells import member, request
    from artifact.measure.crossing_cells import fitting_context
    from artifact.measure.kv_arms import Arm
    from artifact.records import Cell

    run.record(NAME, "account", [account_row(known_shape("llama-3.1-8b"))])
    run.record(NAME, "methods", which_sparsity.rows(known_shape("llama-3.1-8b")))
    # The prefill of the crossing claim serves this one: the same length, so that a run makes it once.
    fit = fitting_context(run.profile, 20 if run.quick else 50, lambda n: [[member(n), member(n, r_kv=0.45)]])
    context = min(fit.tokens, LENGTHS.get(run.profile.name, fit.tokens))
    arms = [Arm("dense", "dense").record(), Arm("catekv", "catekv", options=_method(context)).record()]
    steps = QUICK_STEPS if run.quick else STEPS
    for block in range(QUICK_BLOCKS if run.quick else BLOCKS):
        params = request(run.profile, [], steps, fit.tokens, fit.note)
        params |= {"context": context, "contexts": [context], "arms": arms, "adaptive_share": SHARE}
        run.measure([Cell(NAME, f"steps-{block}", "artifact.measure.kv_timing:decode", params, block)])
    _measure_batches(run, fit.tokens)


def _measure_batches(run: Run, longest: int) -> None:
    """One process per block with batched steps of both modes in equal memory; a reason where no batch fits."""
    from artifact.measure.cells import request
    from artifact.measure.equal_memory import CHECK_TOKENS, ROOM_STEPS, TASK
    from artifact.records import Cell

    cuda = run.profile.device == "cuda"
    steps = (QUICK_BATCH_STEPS if run.quick else BATCH_STEPS) if cuda else SMALL_STEPS
    room = steps + ROOM_STEPS
    plan = _equal(run.profile, room)
    said = {"reason": plan} if isinstance(plan, str) else {"reason": "", **asdict(plan)}
    run.record(NAME, "batch-plan", [{"kind": "batch_plan", **said}])
    if isinstance(plan, str):
        return
    # On a GPU the prefill is the first dense sequence, so it is as long as the batch needs and no longer.
    prefilled = plan.context + GRID_ROOM if cuda else longest
    contexts = [plan.context, CHECK_TOKENS]
    params = request(run.profile, [], room * max(plan.dense, plan.catekv), prefilled, plan.note)
    params |= {
        "timed_steps": steps, "context": plan.context, "contexts": contexts, "adaptive_share": SHARE,
        "batches": {"dense": plan.dense, "catekv": plan.catekv}, "budget_bytes": plan.budget_bytes,
        "together": plan.together, "methods": [_method(context) for context in contexts],
    }  # fmt: skip
    for block in range(QUICK_BLOCKS if run.quick else BLOCKS):
        run.measure([Cell(NAME, f"batches-{block}", TASK, params | {"order_seed": block}, block)])


def _equal(profile: Profile, room: int) -> Equal | str:
    """The batches of both modes, or why there are none."""
    from artifact import gpu_state
    from artifact.measure import equal_plan
    from artifact.measure.cells import is_name
    from artifact.measure.crossing_cells import longest_context, model_shape

    shape = model_shape(profile)
    kept = partial(expected_entries, asdict(shape))
    item = 4 if profile.dtype == "float32" else 2
    if profile.device == "cpu":
        return equal_plan.small(shape, SMALL_TOKENS, kept(SMALL_TOKENS), room, item, SMALL_BATCH)
    behind = room * 16 + GRID_ROOM
    longest = min(longest_context(shape, behind, is_name(profile.model)), LENGTHS.get(profile.name, LONG_TOKENS))
    return equal_plan.on_card(shape, longest, kept, room, item, gpu_state.free_bytes())


def _method(context: int) -> dict[str, Any]:
    """CateKV whose budget is the same share of `context` as the paper's of 128K."""
    from artifact.kv.catekv import CateKV

    budget = BUDGET_TOKENS * context // LONG_TOKENS
    return asdict(CateKV(rows=16, sinks=budget // 32, recent=budget // 8, critical=budget - budget // 32 - budget // 8))


def account_row(shape: Shape) -> dict[str, Any]:
    """Figures that follow from dimensions, of the paper's model at 128K in half precision."""
    share = headwise_r_kv(LONG_TOKENS, SHARE, ETA, BUDGET_TOKENS)
    weights = projection_bytes(shape, Setting()) + head_bytes(shape, Setting())
    held = weights + (0 if shape.tied_head else 2 * shape.vocab * shape.hidden)  # the embedding is held, not read
    cache = float(shape.layers * shape.kv_values_per_token * 2 * LONG_TOKENS)
    rates, batches = [], []
    for own in (cache, share * cache):
        batch = int((A100_BYTES - held) // own)
        batches.append(batch)
        rates.append(batch / (weights + batch * own))
    return {
        "kind": "account",
        "share": share,
        "memory_bound": 1 / share,
        "step_bound": (weights + cache) / (weights + share * cache),
        "headline_eta": (1 / PAPER["memory.llama"].value - (share - SHARE * ETA)) / SHARE,
        "dense_batch": batches[0],
        "catekv_batch": batches[1],
        "throughput_bound": rates[1] / rates[0],
    }


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Exact figures, then storage and steps from the blocks."""
    p = {predicate.name: predicate for predicate in CLAIM.predicates}
    account = next((row for row in rows if row.get("kind") == "account"), None)
    if account is None:
        return [not_run(predicate, "nothing was computed in this run") for predicate in CLAIM.predicates]
    return [
        find(p["kept share at 128K"], exact_interval(100 * account["share"], "%"), profile),
        find(p["eta of the headline"], exact_interval(account["headline_eta"]), profile),
        *_measured(rows, profile, account),
        *_throughput(rows, profile, account),
    ]


def _measured(rows: list[dict[str, Any]], profile: Profile, account: dict[str, Any]) -> list[Finding]:
    p = {predicate.name: predicate for predicate in CLAIM.predicates}
    timed = [row for row in rows if row.get("kind") == "timing"]
    arms = {label: {row["block"]: row for row in timed if row["label"] == label} for label in ("dense", "catekv")}
    blocks = sorted(arms["dense"])
    if not blocks or blocks != sorted(arms["catekv"]):
        return [not_run(p[name], "no block was measured") for name in ("entries kept", "memory", "decode step")]
    gains, entries, memory, bounds = [], [], [], []
    for block in blocks:
        dense, own = arms["dense"][block], arms["catekv"][block]
        gains.append(median(d / o for d, o in zip(dense["ms"], own["ms"], strict=True)))
        expected = expected_entries(dense["shape"], own["context"])
        entries.append(own["retained_entries"] / expected)
        memory.append(dense["storage_bytes"] / own["storage_bytes"] * expected / dense["retained_entries"])
        fixed = dense["projection_bytes"] + dense["head_bytes"]
        bounds.append((fixed + dense["kv_bytes"]) / (fixed + own["kv_bytes"]))
    own = arms["catekv"][blocks[0]]
    extra: dict[str, float | str] = {"byte bound here": bounds[0], "byte bound at 128K": account["step_bound"]}
    extra |= {"context": own["context"], "counted keep ratio": own["counted_r_kv"]}
    smaller = {"times smaller here": dense["storage_bytes"] / own["storage_bytes"], "at 128K": account["memory_bound"]}
    worst = max(entries, key=lambda share: abs(share - 1))
    return [
        find(p["entries kept"], exact_interval(worst, "x"), profile, f"{len(blocks)} blocks"),
        find(p["memory"], exact_interval(min(memory)), profile, "least over blocks", smaller),
        find(p["decode step"], block_interval(gains, unit="x"), profile, f"at {own['context']} tokens", extra),
    ]


def _throughput(rows: list[dict[str, Any]], profile: Profile, account: dict[str, Any]) -> list[Finding]:
    p = {predicate.name: predicate for predicate in CLAIM.predicates}
    names = ("throughput at equal memory", "throughput within its bytes")
    found = equal_memory.throughput(rows)
    if found is None:
        planned = next((row for row in rows if row.get("kind") == "batch_plan"), None)
        if planned is None:
            return [left_out(p[name], "recorded before batches were timed") for name in names]
        return [not_run(p[name], planned["reason"] or "no batch was timed") for name in names]
    dense, own = found.dense, found.catekv
    extra: dict[str, float | str] = {
        "dense batch": dense["batch"],
        "CateKV batch": own["batch"],
        "context": own["context"],
        "GB of memory": own["budget_bytes"] / 1e9,
        "dense tokens per second": 1e3 * dense["batch"] / median(dense["ms"]),
        "CateKV tokens per second": 1e3 * own["batch"] / median(own["ms"]),
        "byte bound here": fmean(found.bounds),
        "byte bound in 80 GB at 128K": account["throughput_bound"],
    }
    shares = [ratio / bound for ratio, bound in zip(found.ratios, found.bounds, strict=True)]
    return [
        find(p[names[0]], block_interval(found.ratios, unit="x"), profile, own["note"], extra),
        find(p[names[1]], block_interval(shares, unit="x"), profile),
    ]


def expected_entries(shape: dict[str, Any], context: int) -> int:
    """Entries of round(r heads) adaptive heads and of the consistent rest, whose budget is the paper's share."""
    heads = shape["layers"] * shape["kv_heads"]
    adaptive = int(SHARE * heads + 0.5)
    return adaptive * context + (heads - adaptive) * (BUDGET_TOKENS * context // LONG_TOKENS)


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
