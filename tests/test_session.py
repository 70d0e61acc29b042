"""Generation that changes branch between steps, against decoders and the float64 model that know no sessions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from artifact.account import Mode
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.prefill import prefill
from artifact.engine.session import Session
from artifact.errors import UserError
from artifact.projection import teal
from tests.float64_decoder import Reference
from tests.models_fixture import Loaded, token_ids

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, NEW = 90, 12


def session(loaded: Loaded, seed: int = 0, r_p: float = 0.6, r_kv: float = 0.4) -> Session:
    calibration = teal.calibrate(loaded.weights, token_ids(200, 9))
    return Session(loaded.weights, token_ids(PROMPT, seed), NEW, calibration, r_p, r_kv)


def run(made: Session, plan: list[tuple[Mode, int]]) -> list[int]:
    found = []
    for mode, steps in plan:
        made.use(mode)
        found += [made.step() for _ in range(steps)]
    return found


def test_dense_generation_is_greedy_decoding_in_float64(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    generated = run(session(loaded), [(Mode.DENSE, NEW)])
    reference, tokens = Reference(loaded.model), token_ids(PROMPT).tolist()
    for token in generated:
        scores = reference.logits(torch.tensor(tokens))[0][-1]
        assert token == int(scores.argmax())
        tokens.append(token)


@pytest.mark.parametrize("mode", [Mode.PROJECTION, Mode.KV, Mode.BOTH])
def test_a_branch_at_keep_ratio_one_generates_what_dense_decoding_does(
    mode: Mode, tiny: Callable[[str], Loaded]
) -> None:
    loaded = tiny("qwen3")
    dense = run(session(loaded), [(Mode.DENSE, NEW)])
    assert run(session(loaded, r_p=1.0, r_kv=1.0), [(mode, NEW)]) == dense


def test_switching_to_a_selection_that_keeps_all_changes_nothing(tiny: Callable[[str], Loaded]) -> None:
    """Entries that other modes decode must reach the selection, in order and once, however often it is left."""
    loaded = tiny("mistral")
    dense = run(session(loaded), [(Mode.DENSE, NEW)])
    plan = [(Mode.KV, 2), (Mode.DENSE, 3), (Mode.KV, 1), (Mode.PROJECTION, 2), (Mode.BOTH, 2), (Mode.DENSE, 2)]
    made = session(loaded, r_p=1.0, r_kv=1.0)
    assert run(made, plan) == dense
    assert [(one.mode, one.steps) for one in made.stretches()] == plan
    assert [one.timed for one in made.stretches()] == [1, 2, 1, 1, 1, 2]  # the first step of each mode compiles


def test_after_a_switch_back_dense_reads_every_entry(tiny: Callable[[str], Loaded]) -> None:
    """A branch discards nothing: dense steps after sparse ones attend to all that the sparse ones appended."""
    loaded = tiny("llama")
    made = session(loaded)
    run(made, [(Mode.BOTH, 4)])
    assert made.cache.tokens == PROMPT - 1 + 4
    copy = made.cache.fork(made.cache.tokens, PROMPT + NEW)
    expected = Decoder(loaded.weights, copy, made.tokens.clone(), greedy=True)
    expected.step()
    made.use(Mode.DENSE)
    made.step()
    assert torch.equal(made.tokens[: PROMPT + 5], expected.tokens[: PROMPT + 5])
    assert torch.equal(made.cache.keys[:, :, : PROMPT + 4], copy.keys[:, :, : PROMPT + 4])


def test_a_late_selection_is_the_prompts_own_plus_what_followed(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    early, late = session(loaded), session(loaded)
    run(early, [(Mode.KV, 1)])
    run(late, [(Mode.DENSE, 3), (Mode.KV, 1)])
    assert early._packed is not None and late._packed is not None
    kept = int(early._packed.lengths[0, 0]) - 1
    assert int(late._packed.lengths[0, 0]) == kept + 4
    assert torch.equal(early._packed.keys[:, :, :kept], late._packed.keys[:, :, :kept])
    entries = late.cache.keys[:, :, PROMPT - 1 : PROMPT + 3]
    assert torch.equal(late._packed.keys[:, :, kept : kept + 4], entries)


def test_bytes_per_step_are_those_of_each_mode(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    made = session(loaded)
    run(made, [(Mode.DENSE, 3), (Mode.BOTH, 3), (Mode.DENSE, 3)])
    first, sparse, last = made.stretches()
    assert sparse.step_bytes < 0.85 * first.step_bytes
    shape = loaded.weights.shape
    entry = 4 * shape.layers * shape.kv_values_per_token
    assert last.step_bytes - first.step_bytes == pytest.approx(6 * entry)


def test_a_second_prompt_is_independent_of_the_first(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    alone = run(session(loaded, seed=5), [(Mode.BOTH, NEW)])
    run(session(loaded, seed=4), [(Mode.BOTH, NEW)])
    assert run(session(loaded, seed=5), [(Mode.BOTH, NEW)]) == alone


def test_what_does_not_fit_is_refused(tiny: Callable[[str], Loaded]) -> None:
    weights = tiny("llama").weights
    with pytest.raises(UserError, match="at least 2"):
        Session(weights, token_ids(1), 4, None, 0.5, 0.3)
    with pytest.raises(UserError, match="window of 512"):
        Session(weights, token_ids(500), 13, None, 0.5, 0.3)
    made = Session(weights, token_ids(20), 2, None, 0.5, 0.3)
    with pytest.raises(UserError, match="needs calibrated"):
        made.use(Mode.PROJECTION)
    run(made, [(Mode.DENSE, 2)])
    with pytest.raises(UserError, match="room for 0"):
        made.step()


def test_prefill_leaves_the_last_prompt_token_to_the_mode(tiny: Callable[[str], Loaded]) -> None:
    loaded = tiny("llama")
    made = session(loaded)
    assert made.cache.tokens == PROMPT - 1
    cache: KVCache = prefill(loaded.weights, token_ids(PROMPT - 1)).cache
    assert torch.equal(made.cache.keys[:, :, : PROMPT - 1], cache.keys)
