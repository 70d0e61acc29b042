"""The batching claim on made-up unions and times, and its measuring tasks on a tiny model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from artifact.engine.batch_check import check_step
from artifact.engine.prefill import prefill
from artifact.engine.prepare import Prepared
from artifact.judge.batching import batched_n_star, crossover, unions
from artifact.judge.levels import with_levels
from artifact.measure.batch_cells import build, measure
from artifact.measure.batch_plan import around, fitting, needed_bytes
from artifact.profiles import Profile
from artifact.projection import teal
from artifact.shapes import known_shape
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import batching as claim
from tests.faults.batching import (
    PROFILE,
    SHAPE,
    UNION,
    Row,
    honest,
    one_mask_for_all,
    step_ms,
    sum_instead_of_union,
    weights_read_for_every_sequence,
)
from tests.models_fixture import Loaded, token_ids

BITS = (32.0, 32.0)


def test_the_papers_batch_of_four() -> None:
    """92% of the weights of Llama-3.1-8B at four sequences: 3.0K tokens."""
    found = crossover(known_shape("llama-3.1-8b"), 4, 0.92, 0.3)
    assert found / 1024 == pytest.approx(2.97, abs=0.005)


def test_honest_rows_give_the_accounts_crossings() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert summarise(findings) is Verdict.REPRODUCED
    order, grows, agrees = (findings[place] for place in (3, 5, 4))
    assert grows.interval is not None and grows.interval.low > 0 and "1,536 tokens" in grows.note
    longer = step_ms(4, 1536, 0.5, 1.0) - step_ms(4, 1536, 1.0, 0.3)
    assert grows.extra["ms longer at 4"] == pytest.approx(longer, rel=0.01)
    for batch in (1, 2, 4):
        star = crossover(SHAPE, batch, UNION[batch], 0.3, BITS)
        assert order.extra[f"measured of {batch}, tokens"] == pytest.approx(star, rel=1e-6)
    assert agrees.interval is not None and abs(agrees.interval.point) < 1e-6


@pytest.mark.parametrize("fault", [one_mask_for_all, sum_instead_of_union, weights_read_for_every_sequence])
def test_a_fault_turns_the_claim_away(fault: Callable[[list[Row]], None]) -> None:
    rows = copy.deepcopy(honest())
    fault(rows)
    assert summarise(claim.judge(rows, PROFILE)) in (Verdict.CONTRADICTED, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(("factor", "verdict"), [(1.5, Verdict.REPRODUCED), (0.3, Verdict.INCONCLUSIVE)])
def test_a_batch_that_crossed_before_its_shortest_context_crossed_earlier(factor: float, verdict: Verdict) -> None:
    """Where the projection trails everywhere, the shortest context bounds it; where it leads, nothing does."""
    rows = copy.deepcopy(honest())
    for row in rows:
        if row["batch"] == 4 and row.get("part") == "crossing" and row["r_p"] < 1:
            row["ms"] = [factor * ms for ms in row["ms"]]
    order = claim.judge(rows, PROFILE)[3]
    assert order.verdict is verdict and ("batch 4" in order.note) == (verdict is Verdict.REPRODUCED)


def test_the_gpu_profile_judges_the_steps_and_shows_the_union_they_read() -> None:
    """Synthetic weights have a union, but not the paper's: it is observed and says so."""
    gpu = Profile("gpu", "llama-3.1-8b", "cuda", "float16", None, 2)
    steps = [row for row in honest() if row["kind"] == "batched"]
    found = {finding.predicate.name: finding for finding in claim.judge(steps, gpu)}
    asserted = {name for name, finding in found.items() if finding.verdict is Verdict.REPRODUCED}
    assert asserted == {"the KV branch gains with the batch"}
    union = found["the union rises"]
    assert union.verdict is Verdict.OBSERVED and "synthetic" in union.note
    assert union.extra["u_4"] == pytest.approx(UNION[4]) and found["batched crossover at most n*/B"].verdict is (
        Verdict.OBSERVED
    )
    weights_read_for_every_sequence(steps)
    findings = {finding.predicate.name: finding for finding in claim.judge(steps, gpu)}
    assert findings["the KV branch gains with the batch"].verdict is Verdict.CONTRADICTED
    alone = [row for row in steps if row["batch"] == 4]
    assert claim.judge(alone, gpu)[-1].verdict is Verdict.NOT_RUN


def test_a_quick_gpu_run_without_single_sequences_leaves_the_comparison_with_them_out() -> None:
    gpu = Profile("gpu", "llama-3.1-8b", "cuda", "float16", None, 2)
    steps = [row for row in honest() if row["kind"] == "batched" and row["batch"] > 1]
    found = {finding.predicate.name: finding for finding in claim.judge(steps, gpu)}
    below = found["batched crossover at most n*/B"]
    assert below.interval is None and below.note == "left out of a quick run"


def test_sweeps_lie_around_the_crossings_and_are_cut_to_the_memory() -> None:
    shape = known_shape("llama-3.1-8b")
    asked = around(shape, claim.GPU_SHARES, 0.5, 0.3)
    assert asked == [(1, (7680, 129280)), (2, (2304, 32768)), (4, (1024, 8448))]
    for (batch, (short, long)), u_b in zip(asked, (0.5, 0.75, 0.92), strict=True):
        assert short < crossover(shape, batch, u_b, 0.3) < long
    assert fitting(shape, asked, 131072, 0.3, 2, True, None) == (asked, "")
    assert fitting(shape, asked, 131072, 0.3, 2, True, 139 << 30) == (asked, "")
    kept, note = fitting(shape, asked, 131072, 0.3, 2, True, 48 << 30)
    assert kept[0][1][1] < 129280 and "batch of 1 cut from 126.2K" in note
    for sweep in kept:
        assert needed_bytes(shape, sweep, max(long for _, (_, long) in kept), 0.3, 2, True) <= 48 << 30
    none, note = fitting(shape, asked, 131072, 0.3, 2, True, 24 << 30)
    assert none == [] and note.count("left out") == 3
    assert fitting(shape, asked, 8192, 0.3, 2, True, None)[0] == [(2, (2304, 8192)), (4, (1024, 8192))]


def test_rows_that_do_not_fit_together_are_errors() -> None:
    missing = [row for row in honest() if (row["block"], row.get("kind"), row["batch"]) != (2, "union", 8)]
    with pytest.raises(ValueError, match="different batch sizes"):
        claim.judge(missing, PROFILE)
    with pytest.raises(ValueError, match="no projection row"):
        batched_n_star([], 2, 0.5, 0.3)
    assert unions([]) == []
    assert all(finding.verdict is Verdict.NOT_RUN for finding in claim.judge([], PROFILE))


@pytest.fixture(scope="module")
def prepared(tiny: Callable[[str], Loaded]) -> Prepared:
    weights = tiny("llama").weights
    tokens = token_ids(420)
    filled = prefill(weights, tokens[:320], query_lengths=(256,), rows=16)
    calibration = teal.calibrate(weights, token_ids(200, 9))
    return Prepared(weights, tokens, calibration, filled.cache, filled.queries, "a text")


@pytest.mark.usefixtures("one_thread")
def test_timed_rows_say_what_they_read_and_agree_with_single_decoding(prepared: Prepared) -> None:
    group = [(256, 1.0, 1.0, "sweep"), (256, 0.5, 1.0, "sweep"), (256, 1.0, 0.3, "crossing")]
    rows = with_levels(measure(prepared, 3, group, 4))
    assert [row["part"] for row in rows] == ["sweep", "sweep", "crossing"]
    dense, sparse, kept = rows
    assert dense["u_b"] == 1 and sparse["counted_r_p"] < sparse["u_b"] < 1
    assert 0.28 < kept["counted_r_kv"] < 0.34 and kept["kv_bytes"] < 0.35 * dense["kv_bytes"]
    assert all(row["gate_error"] < 1e-4 for row in rows) and all(len(row["ms"]) == 4 for row in rows)


@pytest.mark.usefixtures("one_thread")
def test_a_batch_that_mixes_its_sequences_up_is_an_error(prepared: Prepared) -> None:
    decoder = build(prepared, 2, 256, 1.0, 1.0, 4)
    assert not torch.equal(decoder.sequences[0].tokens[256:], decoder.sequences[1].tokens[256:])
    swapped = build(prepared, 2, 256, 1.0, 1.0, 4)
    swapped._launches[0], swapped._launches[1] = swapped._launches[1], swapped._launches[0]
    check_step(swapped)  # the order of the embeddings does not matter
    decoder._launches[1] = decoder._launches[0]  # the second sequence never gets its token
    with pytest.raises(RuntimeError, match="differs from that of the sequence alone"):
        check_step(decoder)
