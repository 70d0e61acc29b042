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
from artifact.projection import teal
from artifact.stats import Verdict
from artifact.verify import summarise
from claims import batching as claim
from tests.faults.batching import PROFILE, SHAPE, UNION, Row, honest, one_mask_for_all, sum_instead_of_union
from tests.models_fixture import Loaded, token_ids

BITS = (32.0, 32.0)


def test_the_papers_batch_of_four() -> None:
    """92% of the weights of Llama-3.1-8B at four sequences: 3.0K tokens."""
    from artifact.shapes import known_shape

    found = crossover(known_shape("llama-3.1-8b"), 4, 0.92, 0.3)
    assert found / 1024 == pytest.approx(2.97, abs=0.005)


def test_honest_rows_give_the_accounts_crossings() -> None:
    findings = claim.judge(honest(), PROFILE)
    assert summarise(findings) is Verdict.REPRODUCED
    order, agrees = findings[3:]
    for batch in (1, 2, 4):
        star = crossover(SHAPE, batch, UNION[batch], 0.3, BITS)
        assert order.extra[f"measured of {batch}, tokens"] == pytest.approx(star, rel=1e-6)
    assert agrees.interval is not None and abs(agrees.interval.point) < 1e-6


@pytest.mark.parametrize("fault", [one_mask_for_all, sum_instead_of_union])
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
