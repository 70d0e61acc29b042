"""A KV configuration is admitted by retrieval, not by perplexity (crossover, section 5.1, Table 3, Appendix G).

The paper: by perplexity a 30% window and a 30% selection both look nearly free, but the window answers only the
placements inside its own region, while the selection answers what dense decoding answers. Measured here: passkey and
multi-key prompts (four similar codes, one asked for), a second turn with the selection of the first question and with
a fresh one, and the perplexity of both branches on the same windows. The selection's parameters were chosen on other
text and other codes; those rows are kept as a sensitivity.

    python claims/retrieval_admissibility.py [--quick | --minutes 10]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from artifact.claim import Claim, Finding, NotRun, Predicate, run_as_script
from artifact.profiles import Profile
from artifact.stats import Region

if TYPE_CHECKING:
    from artifact.measure.configuration import Configuration
    from artifact.records import Cell, Run

NAME = "retrieval_admissibility"
R_KV = 0.3
R_P_CARRIED, R_P_PAPER = 0.7, 0.5  # a small model answers multi-key prompts at 70% keep; the paper's keep is 50%
EVERYWHERE, PAPER = frozenset(("embedded", "paper")), frozenset(("paper",))
# (prompt tokens, passkey placements, multi-key placements, second turn): 40 placements in all, as in the paper
LENGTHS = ((1024, 4, 12, True), (2048, 4, 8, True), (4096, 4, 8, False))
# With a budget of ten minutes or more (--minutes 10), also prompts near the end of the embedded model's window.
LONG_S, LONG_LENGTH = 600.0, (7680, 4, 8, False)
PAPER_LENGTHS = ((32768, 20, 20, True), (65536, 20, 20, True), (130048, 20, 20, False))
QUICK_LENGTHS = ((1024, 4, 8, True),)
ANSWER_TOKENS = 64  # two answers and the second question between them
AGREEMENT = Region(0.8, None, "the window answers 16 of 40; four in five is far from that and resolvable with this n")

CLAIM = Claim(
    name=NAME,
    title="Retrieval separates the selection from the window, perplexity does not",
    paper="crossover",
    place="section 5.1, Table 3, Appendix G",
    needs="a model with trained weights and its tokenizer; 3 GB of memory",
    minutes={"embedded": "4 (quick: 1)", "gpu": "not run: synthetic weights answer nothing", "paper": "20"},
    tables=("table3",),
    predicates=(
        Predicate(
            "dense answers",
            "share of placements that dense decoding answers",
            "section 5.1",
            Region(0.5, None, "agreeing with a model that answers nothing would say nothing"),
            EVERYWHERE,
            "36 to 40 of 40",
        ),
        Predicate(
            "window outside its region",
            "placements outside its retained region that the 30% window answers",
            "section 5.1, Table 3",
            Region(0, 0, "a five-digit code that is not read is guessed once in 90,000 times", "placements"),
            EVERYWHERE,
            "none of 24",
        ),
        Predicate(
            "window returns distractors",
            "multi-key placements at which the window returns another archive's code",
            "section 5.1",
            Region(1, None, "the paper reports 9 at 32K and 19 at 127K; one shows the kind", "placements"),
            EVERYWHERE,
            "9 at 32K, 19 at 127K",
        ),
        Predicate(
            "selection answers what dense answers",
            "share of the placements that dense decoding answers at which the 30% selection answers, too",
            "section 5.1, Table 3",
            AGREEMENT,
            EVERYWHERE,
            "all 40, misses included",
        ),
        Predicate(
            "composition keeps the answers",
            "share of the placements answered at 70% projection keep alone that its composition answers, too",
            "section 5.1, Table 3",
            AGREEMENT,
            EVERYWHERE,
            "all 40 at 50% keep",
        ),
        Predicate(
            "composition at 50% keep",
            "share of the placements dense decoding answers that 50% projection with the 30% selection answers",
            "section 5.1, Table 3",
            AGREEMENT,
            PAPER,
            "all 40",
        ),
        Predicate(
            "second turn, rescored",
            "share of second turns at which a selection scored for the second question answers when dense does",
            "section 5.1, Appendix G",
            AGREEMENT,
            PAPER,
            "all 40 at 32K and 64K",
        ),
        Predicate(
            "second turn, stale",
            "share of second turns at which the selection scored for the first question answers when dense does",
            "section 5.1, Appendix G",
            AGREEMENT,
            PAPER,
            "all 40 at 32K and 64K",
        ),
        Predicate(
            "perplexity does not favour the window's failure",
            "upper end of the interval of window PPL over selection PPL minus 1, same windows",
            "section 5.1, Table 3",
            Region(0.0, None, "the paired interval covers zero or favours the selection: PPL does not reject it"),
            EVERYWHERE,
            "both nearly free",
        ),
        Predicate(
            "sensitivity of the selection",
            "placements answered on the tuning prompts: best minus worst over the varied parameters at 30% keep",
            "Appendix G",
            Region(0, None, "printed only: which parameter decides retrieval", "placements"),
            frozenset(),
        ),
    ),
)


def arms() -> list[Configuration]:
    """Dense, the window, the selection and its compositions."""
    from artifact.measure.configuration import Configuration

    return [
        Configuration(),
        Configuration(r_kv=R_KV, method="window"),
        Configuration(r_kv=R_KV, method="snapkv"),
        Configuration(r_p=R_P_CARRIED),
        Configuration(R_P_CARRIED, R_KV, "snapkv"),
        Configuration(R_P_PAPER, R_KV, "snapkv"),
    ]


def variants() -> list[Configuration]:
    """The selection with one parameter moved at a time: pooling width, rows, aggregation, keep ratio."""
    from artifact.kv.snapkv import SnapKV
    from artifact.measure.configuration import Configuration

    settings = [
        SnapKV(),
        SnapKV(width=7),
        SnapKV(width=15),
        SnapKV(width=31),
        SnapKV(rows=64),
        SnapKV(width=7, rows=64),
    ]
    settings += [SnapKV(aggregate="max"), SnapKV(pool="avg")]
    at = [Configuration(r_kv=R_KV, method="snapkv", snapkv=setting) for setting in settings]
    return [*at, *(Configuration(r_kv=keep, method="snapkv") for keep in (0.1, 0.2))]


def lengths(run: Run) -> tuple[tuple[int, int, int, bool], ...]:
    """Prompt lengths of this run, with their placements and whether they take a second turn."""
    if run.quick:
        return QUICK_LENGTHS
    if run.profile.name == "paper":
        return within_window(run) or LENGTHS
    return (*LENGTHS, LONG_LENGTH) if run.deadline_s >= LONG_S else LENGTHS


def within_window(run: Run) -> tuple[tuple[int, int, int, bool], ...]:
    """The paper's lengths that the model's own window holds, question and answer included."""
    from artifact.measure.crossing_cells import model_shape

    window = model_shape(run.profile).window
    return tuple(one for one in PAPER_LENGTHS if one[0] + ANSWER_TOKENS <= window)


def cells(run: Run) -> list[Cell]:
    """One cell per prompt length, and one that answers the tuning prompts with every variant."""
    from artifact.measure.quality_cells import answer_cell, prompts_of

    found = []
    for tokens, passkey, multikey, second in lengths(run):
        wanted = [prompts_of("passkey", tokens, passkey)] if passkey else []
        wanted += [prompts_of("multikey", tokens, multikey, second)]
        found.append(answer_cell(run, NAME, f"answers-{tokens}", wanted, arms()))
    tuning = [prompts_of("multikey", 1024 if run.quick else 2048, 4)]
    tuning += [] if run.quick else [prompts_of("passkey", 2048, 2)]
    found.append(answer_cell(run, NAME, "sensitivity", tuning, variants(), tuning=True))
    return found


def measure(run: Run) -> None:
    """Answer every prompt, then score window and selection on the same windows."""
    from artifact.measure.cells import is_name
    from artifact.measure.quality_cells import score_windows
    from artifact.measure.quality_plan import protocol

    if is_name(run.profile.model):
        raise NotRun(
            "synthetic weights answer nothing; run `artifact verify retrieval_admissibility --profile embedded`"
        )
    run.measure(cells(run))
    score_windows(run, NAME, protocol(run), arms())


def judge(rows: list[dict[str, Any]], profile: Profile) -> list[Finding]:
    """Judge every predicate from the stored outcomes and likelihoods."""
    from artifact.judge.retrieval_judge import Judgement

    judgement = Judgement(rows, profile, CLAIM)
    carried, paper = f"p{100 * R_P_CARRIED:g}", f"p{100 * R_P_PAPER:g}"
    kv = f"kv{100 * R_KV:g}"
    return [
        judgement.answers("dense answers", "dense"),
        judgement.outside("window outside its region", f"window{100 * R_KV:g}"),
        judgement.distractors("window returns distractors", f"window{100 * R_KV:g}"),
        judgement.kept("selection answers what dense answers", kv, "dense"),
        judgement.kept("composition keeps the answers", f"{carried}+{kv}", carried),
        judgement.kept("composition at 50% keep", f"{paper}+{kv}", "dense"),
        judgement.second_turn("second turn, rescored", kv, "rescored"),
        judgement.second_turn("second turn, stale", kv, "stale"),
        judgement.perplexity("perplexity does not favour the window's failure", f"window{100 * R_KV:g}", kv),
        judgement.sensitivity("sensitivity of the selection", R_KV),
    ]


if __name__ == "__main__":
    raise SystemExit(run_as_script(__file__))
