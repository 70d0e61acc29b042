"""CateKV keeps what dense decoding answers on 41% of the cache, and its head types matter (CateKV, sections 3 and 4).

The paper: with r = 0.4 adaptive heads that keep everything (eta = 1) and a fixed budget for the others, accuracy on
RULER at 128K and in the needle test stays that of full attention, above SnapKV and PyramidKV. Measured here: head types
by vote over a reference set of variable tracking on other text; a needle grid and variable tracking answered from the
ragged cache alone; perplexity beside the baselines at the same kept share, and beside wrong head types.

    python claims/catekv_accuracy.py [--quick]
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, NotRun, Predicate, find, not_run, run_as_script
from artifact.profiles import Profile
from artifact.stats import Region
from paper_tables.figures import figures

if TYPE_CHECKING:
    import torch

    from artifact.records import Run

NAME = "catekv_accuracy"
PAPER = figures("catekv")
NEEDLES = ("passkey", "multikey")
TRAINED = frozenset(("embedded", "paper"))
PAPER_SCALE = frozenset(("paper",))
AGREEMENT = Region(0.8, None, "full attention's accuracy up to what these many prompts resolve; a window answers 40%")
BETTER = Region(1.0, None, "the sentence is an ordering: a perplexity at least as low", "x")
# (test, tokens, placements); the paper's lengths start at 20K
GRID = {
    "embedded": (("passkey", 512, 4), ("multikey", 1024, 12), ("multikey", 2048, 8)),
    "paper": (("passkey", 32768, 8), ("multikey", 32768, 16), ("multikey", 65536, 16)),
}
QUICK_GRID = (("multikey", 512, 12),)
TRACKING = {"embedded": (1024, 6, 1, 2, "value"), "paper": (32768, 12, 4, 2, "names")}
QUICK_TRACKING = (512, 3, 1, 2, "value")

CLAIM = Claim(
    name=NAME,
    title="CateKV answers what dense decoding answers on two fifths of the cache",
    paper="catekv",
    place="sections 3, 4 and B.1",
    needs="a model with trained weights and its tokenizer; 4 GB of memory",
    minutes={"embedded": "3.5 (quick: 1.2)", "gpu": "not run: synthetic weights answer nothing", "paper": "60"},
    tables=("catekv_accuracy", "catekv_needles"),
    predicates=(
        Predicate(
            "dense answers",
            "share of needle placements that dense decoding answers",
            "section 4, Needle in a Haystack",
            Region(0.5, None, "agreeing with a model that answers nothing would say nothing"),
            TRAINED,
            "retrieves at every length from 20K to 1M",
        ),
        Predicate(
            "needle grid",
            "share of the placements dense decoding answers that CateKV answers, too",
            "section 4, Needle in a Haystack",
            AGREEMENT,
            TRAINED,
            "accurately retrieves from 20K to 1M tokens",
        ),
        Predicate(
            "variable tracking",
            "the same for variable-tracking prompts",
            "section 4, RULER",
            AGREEMENT,
            PAPER_SCALE,
            "comparable to full attention on 12 tasks at 128K",
        ),
        Predicate(
            "head types matter",
            "perplexity with as many adaptive heads drawn at random over that with the identified ones",
            "section 3, Coefficient of Variation (CV) Score",
            BETTER,
            TRAINED,
            "classification accuracy decides retention accuracy",
        ),
        Predicate(
            "reversed head types",
            "perplexity with the most consistent heads as adaptive ones over that with the identified ones",
            "section 3",
            BETTER,
            TRAINED,
            "consistent heads need few tokens, adaptive heads need all",
        ),
        Predicate(
            "better than SnapKV",
            "perplexity of SnapKV at the same kept share over CateKV's",
            "section 4, Benchmark results",
            BETTER,
            PAPER_SCALE,
            "outperforms SnapKV on RULER",
        ),
        Predicate(
            "better than PyramidKV",
            "perplexity of PyramidKV at the same kept share over CateKV's",
            "section 4, Benchmark results",
            BETTER,
            PAPER_SCALE,
            "outperforms PyramidKV on RULER",
        ),
        Predicate(
            "with Quest on adaptive heads",
            "perplexity of CateKV with Quest's pages on its adaptive heads over that of Quest alone",
            "appendix B.2.2",
            Region(None, 1.05, "combining costs at most 0.2% of accuracy; 5% of perplexity is far above that", "x"),
            PAPER_SCALE,
            f"accuracy falls by at most {PAPER['quest.loss'].printed}%",
        ),
    ),
)


def measure(run: Run) -> None:
    """Head types, then windows and prompts under every arm."""
    from artifact.measure import kv_plan

    if run.profile.name == "gpu":
        raise NotRun(kv_plan.NO_WEIGHTS)
    heads = run.measure([kv_plan.head_cell(run, NAME)])
    adaptive, wrong = adaptive_heads(heads), adaptive_heads(heads, -1)
    method = kv_plan.catekv(run)
    context = kv_plan.protocol(run).context_tokens
    arms = window_arms(adaptive, wrong, asdict(method), method.budget_tokens, context)
    run.measure([kv_plan.window_cell(run, NAME, arms)])
    paged = quest_arms(adaptive, asdict(method))
    run.measure([kv_plan.window_cell(run, NAME, paged, stepwise=True)])
    grid = QUICK_GRID if run.quick else GRID[kv_plan.scale(run)]
    for number, (test, tokens, placements) in enumerate(grid):
        arms = answer_arms(adaptive, asdict(method), method.budget_tokens, tokens)
        needles = [{"test": test, "tokens": tokens, "placements": placements}]
        run.measure([kv_plan.answer_cell(run, NAME, f"needles-{number}", arms, needles, [])])
    tokens, count, hops, chains, ask = QUICK_TRACKING if run.quick else TRACKING[kv_plan.scale(run)]
    tracking = [{"tokens": tokens, "count": count, "hops": hops, "chains": chains, "ask": ask}]
    arms = answer_arms(adaptive, asdict(method), method.budget_tokens, tokens)
    run.measure([kv_plan.answer_cell(run, NAME, "tracking", arms, [], tracking)])


def adaptive_heads(rows: list[dict[str, Any]], sign: int = 1) -> torch.Tensor:
    """Static head types by vote over the stored reference rows, (L, kv_heads); with sign -1 the wrong way round."""
    import torch

    from artifact.kv.catekv import identify
    from artifact.measure.kv_plan import ADAPTIVE_SHARE

    variations = torch.tensor([row["variations"] for row in rows if row["kind"] == "heads"])
    return identify(sign * variations, ADAPTIVE_SHARE)


def kept_share(adaptive: torch.Tensor, budget: int, tokens: int) -> float:
    """Share of the entries that CateKV keeps of a prompt, from its exact number of adaptive heads."""
    share = float(adaptive.double().mean())
    return share + (1 - share) * min(budget, tokens) / tokens


def answer_arms(adaptive: torch.Tensor, method: dict[str, Any], budget: int, tokens: int) -> list[dict[str, Any]]:
    """Dense, CateKV and SnapKV at the same kept share."""
    from artifact.measure.kv_arms import Arm

    arms = [
        Arm("dense", "dense"),
        Arm("catekv", "catekv", options={**method, "adaptive": adaptive.int().tolist()}),
        Arm("snapkv", "snapkv", kept_share(adaptive, budget, tokens)),
    ]
    return [arm.record() for arm in arms]


def window_arms(
    adaptive: torch.Tensor, reverse: torch.Tensor, method: dict[str, Any], budget: int, tokens: int
) -> list[dict[str, Any]]:
    """The arms of `answer_arms`, PyramidKV and wrong head types."""
    import torch

    from artifact.measure.kv_arms import Arm

    flat = adaptive.flatten().int().tolist()
    drawn = random.Random(0).sample(flat, len(flat))
    wrong = {"random heads": torch.tensor(drawn).view_as(adaptive), "reversed heads": reverse}
    keep = kept_share(adaptive, budget, tokens)
    arms = [Arm("pyramidkv", "pyramidkv", keep)]
    arms += [Arm(name, "catekv", options={**method, "adaptive": types.int().tolist()}) for name, types in wrong.items()]
    return [*answer_arms(adaptive, method, budget, tokens), *(arm.record() for arm in arms)]


def quest_arms(adaptive: torch.Tensor, method: dict[str, Any]) -> list[dict[str, Any]]:
    """Dense, Quest alone, and Quest on CateKV's adaptive heads."""
    from artifact.measure.kv_arms import Arm

    quest = {"keep": 0.3, "page_tokens": 16}
    both = {**method, "adaptive": adaptive.int().tolist(), "quest": quest}
    arms = [Arm("dense", "dense"), Arm("quest", "quest", 0.3), Arm("catekv+quest", "catekv", options=both)]
    return [arm.record() for arm in arms]


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge answers against dense decoding's and perplexities against other arms'."""
    from artifact.judge import kv_judge

    p = {predicate.name: predicate for predicate in CLAIM.predicates}
    needles, tracked = kv_judge.answers_of(rows, NEEDLES), kv_judge.answers_of(rows, ("tracking",))
    dense = kv_judge.share_right(needles, "dense")
    first = p["dense answers"]
    ratio = kv_judge.perplexity_ratio
    return [
        not_run(first, "no needle was asked for") if dense is None else find(first, dense, profile, f"n = {dense.n}"),
        kv_judge.kept(p["needle grid"], needles, "catekv", profile),
        kv_judge.kept(p["variable tracking"], tracked, "catekv", profile),
        ratio(p["head types matter"], rows, "random heads", "catekv", profile),
        ratio(p["reversed head types"], rows, "reversed heads", "catekv", profile),
        ratio(p["better than SnapKV"], rows, "snapkv", "catekv", profile),
        ratio(p["better than PyramidKV"], rows, "pyramidkv", "catekv", profile),
        ratio(p["with Quest on adaptive heads"], rows, "catekv+quest", "quest", profile),
    ]


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
