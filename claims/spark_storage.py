"""What SparK stores per key, counted from the packed cache itself (SparK, abstract and section 4).

The paper: more than 30% of KV storage is saved in addition to token eviction, and a cache of 100K tokens takes more
than 50 GB. Counted here: bytes of kept channels, masks, signs and statistics per key at each pruning ratio; the same
prompt with SnapKV alone and with pruned channels on top; the motivation rebuilt for as many KV heads as query heads
(MHA) and for the model's real 8. Steps of packed caches are timed beside dense ones: at which ratio it is faster,
smaller, or only smaller.

    python claims/spark_storage.py [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, Predicate, find, not_run, run_as_script
from artifact.keep_ratio import pruned_key_bytes
from artifact.profiles import NAMES, Profile
from artifact.shapes import known_shape
from artifact.stats import Region, block_interval, exact_interval
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.records import Run

NAME = "spark_storage"
PAPER = figures("spark")
EVERYWHERE = frozenset(NAMES)
HEAD_DIM = 128
KEEPS = (0.5, 0.3, 0.2)
KEEP_SNAPKV = 0.3
MOTIVATION_TOKENS = 100_000
BLOCKS, QUICK_BLOCKS = 7, 2
STEPS, QUICK_STEPS = 8, 6
TIMED = {"embedded": 4096, "gpu": 131072, "paper": 65536}

CLAIM = Claim(
    name=NAME,
    title="SparK saves what its packed cache says, masks and statistics included",
    paper="spark",
    place="abstract, section 4",
    needs="a model; 4 GB of memory (embedded) or a CUDA GPU (gpu)",
    minutes={"embedded": "1.5 (quick: 0.6)", "gpu": "3", "paper": "6"},
    tables=("spark_storage",),
    predicates=(
        Predicate(
            "bytes per key",
            "largest difference between the packed cache and the byte account over ratios, with and without signs",
            "section 3",
            Region(0, 0, "the account states what is stored to the byte", "bytes"),
            EVERYWHERE,
        ),
        Predicate(
            "saved on top of SnapKV",
            "share of the bytes of SnapKV's entries that 80% pruning of key channels saves",
            "abstract",
            Region(PAPER["saved"].value, None, "the abstract's least saving", "%"),
            EVERYWHERE,
            f"over {PAPER['saved'].printed}%",
        ),
        Predicate(
            "motivation, MHA",
            "cache of 100K tokens of Llama-3.1-8B's dimensions with a KV head for every query head",
            "introduction",
            Region(PAPER["motivation"].value, None, "the printed lower bound, decimal", "GB"),
            EVERYWHERE,
            f"over {PAPER['motivation'].printed} GB",
        ),
        Predicate(
            "motivation, as released",
            "the same with the model's 8 KV heads, to which the paper attributes the figure",
            "introduction",
            Region(None, None, "the model shares its KV heads, so its cache is four times smaller", "GB"),
            frozenset(),
            f"over {PAPER['motivation'].printed} GB",
        ),
        Predicate(
            "step at 80%",
            "time of a dense step over that of a step with 80% of the key channels pruned",
            "section 4",
            Region(None, None, "the paper claims storage, not speed; below 1 it is smaller only", "x"),
            frozenset(),
        ),
        Predicate(
            "step at 50%",
            "the same with half of the key channels pruned",
            "section 4",
            Region(None, None, "the paper claims storage, not speed; below 1 it is smaller only", "x"),
            frozenset(),
        ),
    ),
)


def measure(run: Run) -> None:
    """Bytes at the paper's head dimension, a real prompt's storage, and timed steps."""
    from artifact.measure import kv_plan
    from artifact.measure.cells import member, request
    from artifact.measure.crossing_cells import fitting_context
    from artifact.records import Cell

    run.record(NAME, "keys", key_rows())
    run.record(NAME, "motivation", [motivation_row()])
    if run.profile.name != "gpu":
        params = kv_plan.common(run) | {"context": kv_plan.protocol(run).context_tokens, "arms": storage_arms()}
        run.measure([Cell(NAME, "stored", "artifact.measure.kv_cells:stored", params)])
    # The prefill of the crossing claim serves this one: the same length, so that a run makes it once.
    fit = fitting_context(
        run.profile, 20 if run.quick else 50, lambda n: [[member(n), *(member(n, r_kv=0.9) for _ in timed_arms())]]
    )
    context = min(TIMED[run.profile.name], fit.tokens)
    for block in range(QUICK_BLOCKS if run.quick else BLOCKS):
        params = request(run.profile, [], QUICK_STEPS if run.quick else STEPS, fit.tokens, fit.note)
        params |= {"context": context, "contexts": [context], "arms": timed_arms()}
        run.measure([Cell(NAME, f"steps-{block}", "artifact.measure.kv_timing:decode", params, block)])


def key_rows() -> list[dict[str, Any]]:
    """Pack random half-precision keys of 128 channels at every ratio and compare with the account."""
    import torch

    from artifact.engine.cache import PackedCache
    from artifact.engine.pruned import PrunedCache
    from artifact.kv.spark import SparK

    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(2, 1, 2, 96, HEAD_DIM, generator=generator).half()
    lengths = torch.full((1, 2), 96, dtype=torch.int32)
    source = PackedCache(entries[0], entries[1], lengths, 96)
    queries = [torch.randn(8, 32, HEAD_DIM, generator=generator)]
    rows = []
    for keep in KEEPS:
        for signs in (True, False):
            packed = SparK(keep=keep, signs=signs).compress(source, queries, 0)
            if not isinstance(packed, PrunedCache):
                raise TypeError("packed storage was asked for")
            kept = packed.layers[0].kept.shape[2]
            rows.append({
                "kind": "key",
                "pruned": 1 - keep,
                "signs": signs,
                "kept_channels": kept,
                "stored_bytes": packed.key_bytes(),
                "account_bytes": pruned_key_bytes(HEAD_DIM, kept, 2, signs=signs, statistics=1),
                "dense_bytes": 2 * HEAD_DIM,
                "entry_saved": 1 - (packed.key_bytes() + 2 * HEAD_DIM) / (4 * HEAD_DIM),
                "sector_bytes": packed.sector_bytes(),
                "packed_bytes": packed.fixed_bytes,
            })  # fmt: skip
    return rows


def motivation_row() -> dict[str, Any]:
    """Decimal gigabytes of a cache of 100K tokens in half precision."""
    shape = known_shape("llama-3.1-8b")
    values = 2 * shape.layers * shape.head_dim * 2 * MOTIVATION_TOKENS
    return {"kind": "motivation", "mha_gb": values * shape.heads / 1e9, "gqa_gb": values * shape.kv_heads / 1e9}


def storage_arms() -> list[dict[str, Any]]:
    """SnapKV alone and with pruned channels."""
    from artifact.measure.kv_arms import Arm

    arms = [Arm("snapkv", "snapkv", KEEP_SNAPKV)]
    arms += [Arm(f"snapkv+spark{round(100 - 100 * k)}", "spark", KEEP_SNAPKV, {"keep": k}) for k in KEEPS]
    arms.append(Arm("snapkv+think80", "think", KEEP_SNAPKV, {"keep": 0.2}))
    return [arm.record() for arm in arms]


def timed_arms() -> list[dict[str, Any]]:
    """Dense and packed modes on the whole prompt."""
    from artifact.measure.kv_arms import Arm

    arms = [Arm("dense", "dense"), Arm("spark50", "spark", options={"keep": 0.5, "rows": 16})]
    arms.append(Arm("spark80", "spark", options={"keep": 0.2, "rows": 16}))
    arms.append(Arm("think50", "think", options={"keep": 0.5, "rows": 16}))
    return [arm.record() for arm in arms]


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Byte counts exactly, steps by blocks."""
    p = {predicate.name: predicate for predicate in CLAIM.predicates}
    keys = [row for row in rows if row.get("kind") == "key"]
    motivation = next((row for row in rows if row.get("kind") == "motivation"), None)
    if not keys or motivation is None:
        return [not_run(predicate, "nothing was counted in this run") for predicate in CLAIM.predicates]
    worst = max(keys, key=lambda row: abs(row["stored_bytes"] - row["account_bytes"]))
    each: dict[str, float | str] = {_name(row): f"{row['stored_bytes']:g} of {row['dense_bytes']}" for row in keys}
    return [
        find(
            p["bytes per key"],
            exact_interval(worst["stored_bytes"] - worst["account_bytes"], "bytes"),
            profile,
            "",
            each,
        ),
        _saved(rows, keys, p["saved on top of SnapKV"], profile),
        find(p["motivation, MHA"], exact_interval(motivation["mha_gb"], "GB"), profile),
        find(p["motivation, as released"], exact_interval(motivation["gqa_gb"], "GB"), profile),
        _step(rows, "spark80", p["step at 80%"], profile),
        _step(rows, "spark50", p["step at 50%"], profile),
    ]


def _name(row: dict[str, Any]) -> str:
    return f"{row['pruned']:.0%} pruned{', signs' if row['signs'] else ''}"


def _saved(rows: list[dict[str, Any]], keys: list[dict[str, Any]], predicate: Predicate, profile: Profile) -> Finding:
    """The least saving: of an entry at 128 channels with signs, and of the real prompt, its whole recent tokens
    included.
    """
    entry = min(100 * row["entry_saved"] for row in keys if row["signs"] and row["pruned"] > 0.75)
    stored = {row["label"]: row for row in rows if row.get("kind") == "stored"}
    extra: dict[str, float | str] = {"per entry at 128 channels": entry}
    least = entry
    if stored:
        base = stored["snapkv"]["kept_share"]
        saved = {label: 100 * (1 - row["kept_share"] / base) for label, row in stored.items() if label != "snapkv"}
        extra |= {f"{label} saves": share for label, share in saved.items()}
        least = min(entry, saved["snapkv+spark80"])
    return find(predicate, exact_interval(least, "%"), profile, "the smaller of one entry and one prompt", extra)


def _step(rows: list[dict[str, Any]], label: str, predicate: Predicate, profile: Profile) -> Finding:
    """Dense over packed step time, with the bytes that both read."""
    timed = [row for row in rows if row.get("kind") == "timing"]
    dense = {row["block"]: row for row in timed if row["label"] == "dense"}
    own = {row["block"]: row for row in timed if row["label"] == label}
    if not own or set(own) != set(dense):
        return not_run(predicate, "no step was timed in this run")
    gains = [median(d / o for d, o in zip(dense[b]["ms"], own[b]["ms"], strict=True)) for b in sorted(own)]
    first = own[min(own)]
    interval = block_interval(gains, unit="x")
    kind = "faster and smaller" if interval.low > 1 else "smaller only" if interval.high < 1 else "smaller"
    extra: dict[str, float | str] = {"what it is": kind, "context": first["context"]}
    extra["counted keep ratio"] = first["counted_r_kv"]
    return find(predicate, interval, profile, f"{len(gains)} blocks", extra)


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
