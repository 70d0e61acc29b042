"""The checks of `claims/byte_account.py`: each a predicate and the arithmetic that answers it, no measurement.

A figure that follows from dimensions must round to the printed digits. Where it also uses a printed figure (78% of
peak), the interval covers everything that rounds to that. A gain that the paper measured is held against its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

from artifact import account
from artifact.account import K_TOKENS, Mode, Scope, Setting
from artifact.claim import Predicate, Region
from artifact.profiles import NAMES
from artifact.shapes import Shape, known_shape
from paper_tables.figures import figures, transcript

PAPER = figures("crossover")
PEAK_GBPS = transcript("crossover")["peak_gbps"]
NOMINAL = Setting(r_p=0.5, r_kv=0.3)
CONTEXTS = tuple(k * K_TOKENS for k in (2, 4, 8, 16, 32, 64, 128))
LLAMA_8B, LLAMA_70B = known_shape("Llama-3.1-8B"), known_shape("Llama-3.1-70B")
MISTRAL = known_shape("Mistral-7B-v0.3")

Figure = tuple[float, float, float]  # low, point, high


@dataclass(frozen=True)
class Check:
    """A predicate with the arithmetic that answers it."""

    predicate: Predicate
    figure: Callable[[], float | Figure]


def _check(name: str, figure_id: str, statement: str, region: Region, figure: Callable[[], float | Figure]) -> Check:
    printed = PAPER[figure_id]
    paper_value = f"{printed.printed} {printed.unit}"
    return Check(Predicate(name, statement, printed.place, region, frozenset(NAMES), paper_value), figure)


def _rounds_to(figure_id: str, statement: str, figure: Callable[[], float | Figure]) -> Check:
    """The rebuilt figure rounds to the printed digits."""
    printed = PAPER[figure_id]
    region = Region(printed.low, printed.high, f"what rounds to the printed {printed.printed}", printed.unit)
    return _check(figure_id, figure_id, statement, region, figure)


def _k(tokens: float) -> float:
    return tokens / K_TOKENS


def _reciprocal(interval: Figure) -> Figure:
    low, point, high = interval
    return 1 / high, 1 / point, 1 / low


def table1_row(model: str) -> dict[str, Any]:
    """One row of Table 1 as recorded: crossovers in tokens at 50% / 30%, and the window."""
    shape = known_shape(model)
    return {
        "kind": "table1",
        "model": shape.name,
        "key": model.lower(),
        "r_p": NOMINAL.r_p,
        "r_kv": NOMINAL.r_kv,
        "window_tokens": shape.window,
        "all_tokens": account.n_star(shape, NOMINAL),
        "ffn_tokens": account.n_star(shape, replace(NOMINAL, scope=Scope.FFN)),
    }


def _table1_cell(model: str, column: str) -> float:
    return _k(float(table1_row(model)[f"{column}_tokens"]))


def table_checks() -> Iterator[Check]:
    """Table 1, cell by cell."""
    for entry in transcript("crossover")["table1"]["rows"]:
        for column in ("all", "ffn", "window"):
            figure_id = f"table1.{entry['key']}.{column}"
            yield _rounds_to(figure_id, PAPER[figure_id].what, partial(_table1_cell, entry["model"], column))


def _studied_70b() -> Figure:
    """Crossovers of Llama-3.1-70B over the keep ratios of the paper's sweeps: least, nominal, greatest."""
    ratios = product((0.5, 0.6, 0.7), (0.1, 0.2, 0.3))
    lengths = [_k(account.n_star(LLAMA_70B, Setting(r_p=r_p, r_kv=r_kv))) for r_p, r_kv in ratios]
    return min(lengths), _k(account.n_star(LLAMA_70B, NOMINAL)), max(lengths)


def _batch(sequences: int, union: float) -> float:
    return account.n_star(LLAMA_8B, replace(NOMINAL, batch=sequences, u_b=union))


def _batch_ceiling() -> Figure:
    """Batched crossovers over n* / B for the two printed unions."""
    unions = ((4, PAPER["batch.union.4"].value / 100), (8, PAPER["batch.union.8"].value / 100))
    shares = [_batch(size, union) * size / account.n_star(LLAMA_8B, NOMINAL) for size, union in unions]
    return min(shares), shares[0], max(shares)


def _slope_a100() -> Figure:
    """s at the printed share of peak bandwidth, over all shares that round to it."""
    share = PAPER["peak_share.splitk"]
    ends = (share.high, share.value, share.low)
    low, point, high = (account.gap_ms_per_k(LLAMA_8B, NOMINAL, PEAK_GBPS["a100"] * p / 100) for p in ends)
    return low, point, high


def _share_a6000() -> Figure:
    """Share of peak bandwidth that the printed s implies, over all s that round to it."""
    s, at_peak = PAPER["slope.a6000"], account.gap_ms_per_k(LLAMA_8B, NOMINAL, PEAK_GBPS["a6000"])
    return at_peak / s.high, at_peak / s.value, at_peak / s.low


def _shift_a6000() -> Figure:
    """K tokens per ms between the printed s and the least s that peak bandwidth allows."""
    printed, at_peak = PAPER["slope.a6000"].value, account.gap_ms_per_k(LLAMA_8B, NOMINAL, PEAK_GBPS["a6000"])
    return 1 / printed, 1 / printed, 1 / at_peak


def _matched_keep(figure_id: str) -> Figure:
    """The projection keep ratio that puts the crossover at the printed length with 10% of the cache kept."""
    printed, at_half = PAPER[figure_id], _k(account.n_star(LLAMA_8B, replace(NOMINAL, r_kv=0.1)))
    # n* is linear in 1 - r_P; a length no ratio gives must come out as a percentage beyond the region, not as an error
    low, point, high = (100 - 50 * k / at_half for k in (printed.high, printed.value, printed.low))
    return low, point, high


def prediction_checks() -> Iterator[Check]:
    """Figures that the text derives from dimensions: the byte bound, precision, batching, the slope, the inversion."""
    yield _check(
        "70b.beyond_window",
        "70b.beyond_window",
        "Llama-3.1-70B crosses beyond its window at r_P 0.5-0.7, r_KV 0.1-0.3",
        Region(_k(LLAMA_70B.window), None, "the released window", "K tokens"),
        _studied_70b,
    )
    yield _rounds_to(
        "bound.kv.128k",
        "byte bound of the KV branch at 128K and 30% keep",
        lambda: account.bound(LLAMA_8B, NOMINAL, 128 * K_TOKENS, Mode.KV),
    )
    yield _check(
        "quant4.closer",
        "quant4.closer",
        "4-bit weights with a 16-bit cache divide the crossover by four",
        Region(4 - 1e-9, 4 + 1e-9, "s_w / s_kv is exactly a quarter", "x"),
        lambda: account.n_star(LLAMA_8B, NOMINAL) / account.n_star(LLAMA_8B, replace(NOMINAL, weight_bits=4)),
    )
    yield _rounds_to(
        "batch.n_star.4",
        "crossover of each of four sequences at a 92% union",
        lambda: _k(_batch(4, PAPER["batch.union.4"].value / 100)),
    )
    yield _check(
        "batch.ceiling",
        "batch.n_star.4",
        "batched crossovers are at most n*/B",
        Region(None, 1, "u_B is at least r_P", "of n*/B"),
        _batch_ceiling,
    )
    yield _rounds_to("slope.a100", "s on A100 at 78% of 2,039 GB/s", _slope_a100)
    yield _rounds_to("shift.a100", "K tokens per ms of kernel cost on A100", lambda: _reciprocal(_slope_a100()))
    yield _check(
        "slope.a6000",
        "slope.a6000",
        "the printed s on RTX A6000 needs no more than its 768 GB/s",
        Region(0, 1, "nothing reads faster than peak", "of peak"),
        _share_a6000,
    )
    yield _rounds_to("shift.a6000", "K tokens per ms of kernel cost on RTX A6000", _shift_a6000)
    yield _rounds_to(
        "matched.1.0",
        "crossover at 50% projection keep and 10% KV keep",
        lambda: _k(account.n_star(LLAMA_8B, replace(NOMINAL, r_kv=0.1))),
    )
    keep = Region(
        PAPER["matched.keep_p.low"].value,
        PAPER["matched.keep_p.high"].value,
        "the projection keep ratios whose perplexity the paper measured",
        "% kept",
    )
    for figure_id in ("matched.0.5", "matched.0.2"):
        statement = (
            f"with 10% KV keep, {PAPER[figure_id].printed}K is the crossover of a projection keep within the sweep"
        )
        yield _check(figure_id, figure_id, statement, keep, partial(_matched_keep, figure_id))


def _share_of_peak(figure_id: str, mode: Mode) -> Figure:
    """Bandwidth that printed tokens per second need for the weights alone, over the peak of RTX A6000."""
    printed, step = PAPER[figure_id], account.step_bytes(MISTRAL, NOMINAL, 0, mode)
    low, point, high = (rate * step / (PEAK_GBPS["a6000"] * 1e9) for rate in (printed.low, printed.value, printed.high))
    return low, point, high


def _share_of_bound(figure_id: str, shape: Shape, setting: Setting, n_tokens: int, modes: tuple[Mode, ...]) -> Figure:
    """A printed gain over its byte bound; over the larger bound where the paper does not say which branch it was."""
    limit = max(account.bound(shape, setting, n_tokens, mode) for mode in modes)
    printed = PAPER[figure_id]
    return printed.low / limit, printed.value / limit, printed.high / limit


def gain_checks() -> Iterator[Check]:
    """Gains that the paper measured, as shares of their byte bounds (sections 4.2, 4.4, 5.2, 5.3)."""
    below = Region(None, 1, "a step cannot be faster than its bytes", "of bound")
    wasteful = Region(1, None, "a gain above the bound shows a wasteful dense baseline", "of bound")
    within_6 = Region(0.935, 1, "printed as within 6% of the bound, +-0.5%", "of bound")
    within_4 = Region(0.955, 1, "printed as within 4% of the bound, +-0.5%", "of bound")
    p_band = Region(0.895, 0.965, "printed as 4 to 10% below the bound, +-0.5%", "of bound")
    kv10, kv20 = Setting(r_p=0.5, r_kv=0.1), Setting(r_p=0.5, r_kv=0.2)
    either = (Mode.PROJECTION, Mode.KV)
    gains: tuple[tuple[str, Setting, int, tuple[Mode, ...], Region], ...] = (
        ("gain.p.2k.a100", NOMINAL, 2, (Mode.PROJECTION,), below),
        ("gain.p.2k.a6000", NOMINAL, 2, (Mode.PROJECTION,), p_band),
        ("gain.p.32k.a100", NOMINAL, 32, (Mode.PROJECTION,), below),
        ("gain.kv.128k.a100", NOMINAL, 128, (Mode.KV,), within_6),
        ("gain.kv10.32k.a100", kv10, 32, (Mode.KV,), within_4),
        ("gain.kv.budget0.1", kv20, 32, (Mode.KV,), below),
        ("gain.single.64k.a6000", NOMINAL, 64, either, below),
        ("gain.both.128k.a100", NOMINAL, 128, (Mode.BOTH,), below),
        ("gain.both.64k.a6000", NOMINAL, 64, (Mode.BOTH,), below),
        ("baseline.masked", NOMINAL, 128, (Mode.KV,), wasteful),
        ("baseline.fused", NOMINAL, 128, (Mode.KV,), wasteful),
        ("baseline.splitk", NOMINAL, 128, (Mode.KV,), below),
    )
    for figure_id, setting, k, modes, region in gains:
        side = "above" if region is wasteful else "at most"
        statement = f"{PAPER[figure_id].what} is {side} its byte bound"
        share = partial(_share_of_bound, figure_id, LLAMA_8B, setting, k * K_TOKENS, modes)
        yield _check(figure_id, figure_id, statement, region, share)
    for figure_id, mode in (("mistral.dense", Mode.DENSE), ("mistral.projection", Mode.PROJECTION)):
        statement = f"{PAPER[figure_id].what} reads at most the peak 768 GB/s, its cache left out"
        peak = Region(0, 1, "nothing reads faster than peak", "of peak")
        yield _check(figure_id, figure_id, statement, peak, partial(_share_of_peak, figure_id, mode))


def bound_checks() -> Iterator[Check]:
    """How the bounds move with context (section 3.3): steps from each context of the sweep to the next."""
    place, everywhere = "Section 3.3", frozenset(NAMES)
    falls = Region(None, 1, "each step down", "x per step")
    rises = Region(1, None, "each step up", "x per step")
    largest = Region(1, None, "at least the larger single bound", "of the larger")
    statement = "the bound of the {} branch {} from 2K to 128K"
    yield Check(
        Predicate("bound.p.falls", statement.format("projection", "falls"), place, falls, everywhere),
        lambda: _steps(Mode.PROJECTION),
    )
    yield Check(
        Predicate("bound.kv.rises", statement.format("KV", "rises"), place, rises, everywhere), lambda: _steps(Mode.KV)
    )
    yield Check(
        Predicate("bound.both.largest", "the bound of the composition is the largest", place, largest, everywhere),
        _composition_lead,
    )


def _steps(mode: Mode) -> Figure:
    bounds = [account.bound(LLAMA_8B, NOMINAL, n, mode) for n in CONTEXTS]
    ratios = [later / earlier for earlier, later in pairwise(bounds)]
    return min(ratios), ratios[0], max(ratios)


def _composition_lead() -> Figure:
    def lead(n: int) -> float:
        projection, kv, both = (account.bound(LLAMA_8B, NOMINAL, n, m) for m in (Mode.PROJECTION, Mode.KV, Mode.BOTH))
        return both / max(projection, kv)

    leads = [lead(n) for n in CONTEXTS]
    return min(leads), leads[0], max(leads)


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order of the paper."""
    return (*table_checks(), *bound_checks(), *prediction_checks(), *gain_checks())
