"""Routing tokens by their identity keeps quality that static sparsity gives away (sats, equations 11-14, Tables 6, 8).

The paper: a table of mean excess damage per token id, a threshold for 25, 50 and 75% routed tokens on a held-out split;
routing improves on static SATS at 50% sparsity and keeps most of the throughput. Measured here: perplexity of dense,
static, routed and randomly routed arms on the same windows, and interleaved decode steps of the operating point, on a
GPU with weights in float32 (Table 6) and bfloat16 (Table 8). Much of the gain is that fewer tokens are sparse at all,
so a random table of the same share is always printed beside.

    python claims/token_routing.py [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, Predicate, find, not_run, run_as_script
from artifact.judge import masked_speed
from artifact.profiles import NAMES, Profile
from artifact.stats import Interval, Region, block_interval, exact_interval, over_dense
from paper_tables.figures import figures

if TYPE_CHECKING:
    from artifact.measure.masked_plan import Arm
    from artifact.records import Run

NAME = "token_routing"
PAPER = figures("sats")
SHARES = tuple(PAPER[f"routed.{key}"].value / 100 for key in ("low", "mid", "high"))
SPARSITY, OPERATING = PAPER["matched.high"].value / 100, PAPER["routed.mid"].value / 100
SEEDS = (1, 2)  # random tables; a single one may hit or miss a frequent token
BLOCKS, QUICK_BLOCKS = 7, 3
STEPS, QUICK_STEPS = 16, 10
CONTEXTS = {"embedded": 256, "gpu": 1024, "paper": 1024}
SHAPES = ("Llama-3.1-8B", "Qwen3-8B")  # the paper's models, with synthetic weights in profile gpu
TRAINED, EVERYWHERE = frozenset(("embedded", "paper")), frozenset(NAMES)

CLAIM = Claim(
    name=NAME,
    title="Routing tokens to the sparse path by their identity beats sparsity for all",
    paper="sats",
    place="equations 11 to 14, Tables 6 and 8",
    needs="a model with trained weights and its tokenizer (speed alone: a CUDA GPU); 3 GB of memory",
    minutes={"embedded": "3 (quick: 0.7)", "gpu": "4", "paper": "60"},
    tables=("sats_table6", "sats_table8"),
    predicates=(
        Predicate(
            "routed beats static",
            "perplexity of routed over static SATS minus 1, windows paired, at the share where it gains least",
            "Table 6",
            Region(None, 0.0, "routing improves the quality relative to static SATS, at every share"),
            TRAINED,
            "better accuracy and perplexity at 25, 50 and 75%",
        ),
        Predicate(
            "routed beats random",
            "perplexity of routed over randomly routed minus 1 at half of the tokens, windows paired",
            "equations 11 to 13",
            Region(None, 0.0, "the score must know which tokens are safe; a random table knows nothing"),
            TRAINED,
        ),
        Predicate(
            "realised share",
            "largest distance between target and realised share of routed tokens on the held-out split",
            "equation 14",
            Region(0.0, 0.02, "two points: a few frequent ids carry that much of a text, and go one way together"),
            TRAINED,
        ),
        Predicate(
            "faster than dense",
            "time of a dense step over that of a routed one at half of the tokens",
            "Tables 6 and 8",
            Region(1.0, None, "routing preserves most of the throughput gain; some gain must be there", "x"),
            EVERYWHERE,
            "most of the throughput gain over dense inference",
        ),
        Predicate(
            "slower than static",
            "time of a routed step over that of a static one",
            "Table 6",
            Region(1.0, None, "static SATS provides the best throughput gain", "x"),
            EVERYWHERE,
            "static SATS is fastest",
        ),
    ),
)


def seeds(share: float) -> tuple[int, ...]:
    """Random tables of a share: several where they are judged."""
    return SEEDS if share == OPERATING else SEEDS[:1]


def arms(quick: bool) -> list[Arm]:
    """Dense, static, and per share a table of scores and random ones."""
    from artifact.measure.masked_plan import Arm

    found = [Arm(), Arm("sats", SPARSITY)]
    for share in (OPERATING,) if quick else SHARES:
        found.append(Arm("sats", SPARSITY, share))
        found += [Arm("sats", SPARSITY, share, "random", seed) for seed in seeds(share)]
    return found


def timed_arms(trained: bool) -> list[Arm]:
    """Dense, CATS, static SATS and routed SATS; a synthetic model has no scores, its table is random."""
    from artifact.measure.masked_plan import Arm

    table = "scores" if trained else "random"
    return [Arm(), Arm("cats", SPARSITY), Arm("sats", SPARSITY), Arm("sats", SPARSITY, OPERATING, table, SEEDS[0])]


def measure(run: Run) -> None:
    """Score the windows under every arm, then time the operating point, a process a block."""
    from artifact.measure.masked_cells import score_cell
    from artifact.measure.masked_plan import sizes
    from artifact.measure.masked_timing import settings, timing_cell

    plan, trained = sizes(run.profile, run.quick), run.profile.name != "gpu"
    if trained:
        run.measure([score_cell(run, NAME, "arms", plan, arms(run.quick))])
    blocks, steps = (QUICK_BLOCKS, QUICK_STEPS) if run.quick else (BLOCKS, STEPS)
    context, timed = CONTEXTS[run.profile.name], timed_arms(trained)
    wanted = settings(run, NAME, timed, context + steps, ("",) if trained else SHAPES)
    for block in range(blocks):
        for setting in wanted:
            run.measure([timing_cell(run, NAME, plan, timed, context, steps, block, setting)])


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge quality where windows were scored, and speed per block."""
    windows = [row for row in rows if row.get("kind") == "window"]
    timed = [row for row in rows if row.get("kind") == "timing"]
    return [*_quality(windows, profile), *_speed(timed, masked_speed.no_room(rows), profile)]


def _quality(windows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    from artifact.measure import quality

    static, random, share = CLAIM.predicates[:3]
    if not windows:
        return [not_run(one, "synthetic weights have no perplexity") for one in (static, random, share)]
    losses = quality.losses(windows)
    base = f"sats{100 * SPARSITY:g}"
    shares = sorted({row["share"] for row in windows if row["share"] < 1})
    gains = {one: quality.increase(losses, f"{base}-routed{100 * one:g}", base) for one in shares}
    least = max(gains, key=lambda one: gains[one].high)
    ppl: dict[str, float | str] = {f"PPL {label}": quality.perplexity(losses, label).point for label in losses}
    control = {one: over_random(losses, base, one) for one in shares}
    shown: dict[str, float | str] = {f"over random at {one:.0%}": control[one].point for one in shares}
    scored = {row["label"]: row for row in windows if row["held_out_share"] is not None}
    off = [abs(row["held_out_share"] - row["share"]) for row in scored.values()]
    realised: dict[str, float | str] = {
        f"held-out share, {label}": row["held_out_share"] for label, row in scored.items()
    }
    for label in dict.fromkeys(row["label"] for row in windows if row["share"] < 1):
        own = [row["masked_share"] for row in windows if row["label"] == label]
        realised[f"scored share, {label}"] = sum(own) / len(own)
    return [
        find(static, gains[least], profile, f"least at {least:.0%} routed", ppl),
        find(random, control[OPERATING], profile, f"{len(SEEDS)} random tables", shown),
        find(share, exact_interval(max(off)), profile, "", realised),
    ]


def over_random(losses: dict[str, dict[int, list[float]]], base: str, share: float) -> Interval:
    """Perplexity of the scored table over that of random ones of the same share minus 1, windows paired."""
    from artifact.measure import quality

    tables = [f"{base}-random{100 * share:g}-{seed}" for seed in seeds(share)]
    mixed = {
        window: [sum(each) / len(each) for each in zip(*(losses[one][window] for one in tables), strict=True)]
        for window in losses[base]
    }
    both = {"random": mixed, "routed": losses[f"{base}-routed{100 * share:g}"]}
    return quality.increase(both, "routed", "random")


def _speed(timed: list[dict[str, Any]], no_room: dict[str, float | str], profile: Profile) -> list[Finding]:
    """Ratios of step times per block, trimmed means of pairs; of all models and formats the one that gains least is
    judged, and all are printed.
    """
    faster, slower = CLAIM.predicates[3:]
    if not timed:
        why = "; ".join(map(str, no_room.values())) or "no step was timed"
        return [not_run(one, why) for one in (faster, slower)]
    gains, prices, extra = {}, {}, dict(no_room)
    for setting, blocks in masked_speed.by_setting(timed).items():
        ratios = [speed_ratios(block) for block in blocks]
        gains[setting] = block_interval([ratio["dense"] / ratio["routed"] for ratio in ratios], unit="x")
        prices[setting] = block_interval([ratio["routed"] / ratio["static"] for ratio in ratios], unit="x")
        for name in ("routed", "static", "cats"):
            extra[f"dense over {name}, {setting}"] = median(ratio["dense"] / ratio[name] for ratio in ratios)
        extra[f"bytes, dense over static, {setting}"] = byte_bound(blocks[0])
    least, cheapest = min(gains, key=lambda one: gains[one].low), min(prices, key=lambda one: prices[one].low)
    return [
        find(faster, gains[least], profile, least, extra),
        find(slower, prices[cheapest], profile, cheapest),
    ]


def kind_of(row: dict[str, Any]) -> str:
    """The part an arm plays in this claim."""
    if row["method"] != "sats":
        return str(row["method"])
    return "routed" if row["share"] < 1 else "static"


def speed_ratios(block: list[dict[str, Any]]) -> dict[str, float]:
    """Step time of every arm over that of dense."""
    return over_dense({kind_of(row): row["ms"] for row in block})


def byte_bound(block: list[dict[str, Any]]) -> float:
    """Bytes of a dense step over those of a static one, as counted."""
    moved = {kind_of(row): row["step_bytes"] for row in block}
    return float(moved["dense"] / moved["static"])


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
