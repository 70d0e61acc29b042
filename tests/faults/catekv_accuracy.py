"""Seeded faults of `catekv_accuracy`, on windows, needles and tracking as the paper describes them."""

from __future__ import annotations

from ._kv import CATEKV, PAPER_PROFILE, Row, answers, catekv_rows, windows

PROFILE = PAPER_PROFILE
honest = catekv_rows


def heads_do_not_matter(rows: list[Row]) -> None:
    """The head types are ignored: random heads give the same likelihoods"""
    rows[:] = [*windows({**CATEKV, "random heads": CATEKV["catekv"]}), *answers()]


def catekv_runs_reversed(rows: list[Row]) -> None:
    """A wrong mask: consistent heads are treated as adaptive ones and the other way round"""
    rows[:] = [*windows({**CATEKV, "catekv": 0.4, "reversed heads": 0.02}), *answers()]


def cache_of_another_prompt(rows: list[Row]) -> None:
    """CateKV decodes on the cache of the prompt before: its needles are lost"""
    for row in rows:
        if row["kind"] == "answer" and row["label"] == "catekv" and row["test"] == "multikey":
            row.update(score=0.0, outcome="wrong")


def dense_answers_nothing(rows: list[Row]) -> None:
    """A wrong rotary position: even dense decoding answers nothing, and all arms agree"""
    for row in rows:
        if row["kind"] == "answer":
            row.update(score=0.0, outcome="wrong")


def unequal_arms(rows: list[Row]) -> None:
    """One prompt is lost from CateKV's arm"""
    rows.remove(next(r for r in rows if (r["label"], r.get("prompt_id")) == ("catekv", "passkey1")))


UNEQUAL = unequal_arms
FAULTS = (heads_do_not_matter, catekv_runs_reversed, cache_of_another_prompt, dense_answers_nothing, unequal_arms)
