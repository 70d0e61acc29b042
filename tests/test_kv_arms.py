"""Every KV method through one door: passes equal decode steps on the method's own storage, shares are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_decoder import Tiny, decode
from test_retrieval import STORY, Letters

from artifact.engine import teacher
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.prefill import Prefill, logits, prefill
from artifact.errors import UserError
from artifact.measure import kv_arms, kv_cells, kv_timing
from artifact.measure.kv_arms import Arm
from artifact.measure.retrieval import Writer
from artifact.measure.workbench import ROWS
from artifact.tasks import variable_tracking
from tests.inputs import relative
from tests.models_fixture import token_ids
from tests.tolerances import LOGITS

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, STEPS = 90, 6
TYPES = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
CATEKV = {"rows": 8, "sinks": 4, "recent": 8, "critical": 8, "adaptive": TYPES}
PRUNING = {"rows": 8, "recent": 8}
ARMS = [
    Arm("dense", "dense"),
    Arm("window", "window", 0.4),
    Arm("snapkv", "snapkv", 0.4, {"rows": 8}),
    Arm("pyramidkv", "pyramidkv", 0.4, {"rows": 4, "beta": 4.0}),
    Arm("catekv", "catekv", options=CATEKV),
    Arm("spark", "spark", options={"keep": 0.3, **PRUNING}),
    Arm("sampled", "spark", options={"keep": 0.3, "recovery": "sample", "signs": False, **PRUNING}),
    Arm("snapkv+spark", "spark", 0.5, {"keep": 0.3, **PRUNING}),
    Arm("think", "think", options={"keep": 0.3, **PRUNING}),
    Arm("quest", "quest", 0.4, {"page_tokens": 8}),
    Arm("catekv+quest", "catekv", options={**CATEKV, "quest": {"keep": 0.4, "page_tokens": 8}}),
]


def filled(tiny: Tiny) -> tuple[Any, Prefill, torch.Tensor]:
    weights, ids = tiny("mistral").weights, token_ids(PROMPT + STEPS)
    return weights, prefill(weights, ids[:PROMPT], PROMPT + STEPS, [PROMPT], 16), ids


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.label)
def test_a_pass_over_many_tokens_equals_decode_steps_from_the_arms_own_storage(tiny: Tiny, arm: Arm) -> None:
    weights, own, ids = filled(tiny)
    branch = kv_arms.bind(kv_arms.from_record(arm.record()), own.cache, own.queries[PROMPT], 0.125, STEPS)
    cache = own.cache.fork(PROMPT, PROMPT + STEPS) if branch is None else own.cache.released()
    if branch is not None and branch.per_step:
        assert torch.isfinite(decode(Decoder(weights, cache, ids, packed=branch), STEPS)).all()
        return
    passed = logits(weights, teacher.forward(weights, own.cache, ids[PROMPT:], None, branch).hidden)
    decoder = Decoder(weights, cache, ids, packed=branch)
    assert relative(decode(decoder, STEPS), passed) < LOGITS
    share = kv_arms.kept_share(kv_arms.bind(arm, own.cache, own.queries[PROMPT], 0.125, 0), own.cache)
    assert decoder.counted().r_kv == pytest.approx(share, abs=0.04)
    assert (share == 1) == (arm.method == "dense" or arm.simulated)


def test_extending_under_a_branch_equals_decoding_it(tiny: Tiny) -> None:
    """Given tokens appended in one pass leave the same storage as steps do, for ragged and pruned caches alike."""
    for arm in (ARMS[4], ARMS[5]):
        weights, own, ids = filled(tiny)
        passed = kv_arms.bind(arm, own.cache, own.queries[PROMPT], 0.125, STEPS)
        stepped = kv_arms.bind(arm, own.cache, own.queries[PROMPT], 0.125, STEPS)
        decode(Decoder(weights, own.cache.released(), ids, packed=stepped), STEPS)
        teacher.extend(weights, own.cache.fork(PROMPT, PROMPT + STEPS), ids[PROMPT:], 0, None, passed)
        assert passed is not None and stepped is not None and torch.equal(passed.lengths, stepped.lengths)
        for layer in range(3):
            assert relative(passed.entries(layer).keys, stepped.entries(layer).keys) < LOGITS


def test_what_no_method_is_called_is_a_sentence() -> None:
    with pytest.raises(UserError, match="no KV method is called 'magic'"):
        Arm("x", "magic")


def test_a_simulated_arm_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_timing, "prepared_for", lambda params, say: None)
    sampled = next(arm for arm in ARMS if arm.simulated)
    with pytest.raises(ValueError, match="a simulated arm has no time of its own"):
        list(kv_timing.decode({"context": 1, "steps": 1, "arms": [sampled.record()]}))


def bench(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A workbench of a tiny model whose prefills are made in memory."""
    made = SimpleNamespace(
        weights=tiny("mistral").weights, tokenizer=Letters(), evaluation_text=STORY, calibration_text=STORY,
        text_label="a story",
    )  # fmt: skip

    def prefilled(_: Any, tokens: torch.Tensor, doing: str) -> Any:
        own = prefill(made.weights, tokens, None, [len(tokens)], ROWS)
        return SimpleNamespace(tokens=tokens, cache=own.cache, queries=own.queries[len(tokens)])

    monkeypatch.setattr(kv_cells, "prefilled", prefilled)
    monkeypatch.setattr(kv_cells, "_bench", lambda params: made)
    return made


def test_reference_prompts_give_a_variation_per_head(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(tiny, monkeypatch)
    params = {
        "tokens": 400,
        "samples": 2,
        "catekv": {name: CATEKV[name] for name in ("rows", "sinks", "recent", "critical")},
    }
    rows = [row for row in kv_cells.identify(params) if "kind" in row]
    assert len(rows) == 2 and torch.tensor(rows[0]["variations"]).shape == (3, 3)
    assert rows[0]["prompt_id"] != rows[1]["prompt_id"]


def test_answers_of_every_arm_come_from_equal_prompts_and_leave_each_other_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench(tiny, monkeypatch)
    arms = [arm.record() for arm in (ARMS[0], ARMS[2], ARMS[4])]
    params = {
        "arms": arms, "needles": [{"test": "multikey", "tokens": 480, "placements": 4}],
        "tracking": [{"tokens": 420, "count": 1, "hops": 1, "chains": 1, "ask": "value"}],
    }  # fmt: skip
    rows = [row for row in kv_cells.answered(params) if "kind" in row]
    alone = [row for row in kv_cells.answered({**params, "arms": arms[:1]}) if "kind" in row]
    assert len(rows) == 15 and [row for row in rows if row["label"] == "dense"] == alone
    shares = {row["label"]: row["kept_share"] for row in rows if row["test"] == "multikey"}
    assert shares["dense"] == 1.0 and shares["snapkv"] == pytest.approx(0.4, abs=0.01) and shares["catekv"] < 0.4


def test_an_answer_leaves_the_prompts_cache_as_it_was(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same greedy tokens as decoding on a copy of the dense cache, again after every other arm has answered."""
    made = bench(tiny, monkeypatch)
    prompt = variable_tracking.prompts(Writer(made.tokenizer, STORY, 420), 420, 1, 1, 1, "value")[0]  # type: ignore[arg-type]
    tokens, count = prompt.tokens, len(prompt.tokens)
    own = prefill(made.weights, tokens[:-ROWS], 440).cache
    buffer = torch.cat((tokens, torch.zeros(6, dtype=torch.int64)))
    copy: KVCache = prefill(made.weights, tokens[:-1], 440).cache
    decode(Decoder(made.weights, copy, buffer, greedy=True), 5)
    asked = kv_cells._asked(made, own, count - ROWS, tokens)
    for arm in (ARMS[0], ARMS[2], ARMS[4], ARMS[0]):
        ((found, _),) = kv_cells._answers(made, [asked], 5, arm)
        if arm is ARMS[0]:
            assert found == buffer[count : count + 5].tolist()
    assert asked.cache.tokens == count - 1
