"""The embedded pretrained model (`make setup` fetches it): real weights, whose outlier channels no random model has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from artifact import embedded
from artifact.engine import models, prompts
from artifact.engine.checkpoints import open_checkpoint
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prefill import logits, prefill
from tests.inputs import relative
from tests.tolerances import LOGITS_PRETRAINED

TEXT = (
    "A decode step reads every weight of the model once and the whole cache once. The lighthouse keeper climbed the "
    "stairs each evening, lit the lamp and wrote the weather into a book that nobody had asked him to keep. One night"
)
STEPS = 64
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pretrained() -> Iterator[tuple[Weights, Any, torch.Tensor]]:
    """Return (engine's weights, transformers' model of the same numbers, token ids of TEXT)."""
    import transformers

    source = str(embedded.path())
    folder = open_checkpoint(source).folder
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    yield models.load(source), model.eval(), prompts.encode(models.load_tokenizer(source), TEXT)


def test_dense_prefill_steps_and_64_greedy_tokens_equal_transformers(
    pretrained: tuple[Weights, Any, torch.Tensor],
) -> None:
    weights, model, ids = pretrained
    count = ids.shape[0]
    tokens = torch.zeros(count + STEPS, dtype=torch.int64)
    tokens[:count] = ids
    filled = prefill(weights, ids[: count - 1], capacity=count + STEPS)
    decoder = Decoder(weights, filled.cache, tokens, greedy=True)
    decoder.check_room(STEPS)
    rows = []
    for _ in range(STEPS):
        decoder.step()
        rows.append(decoder.logits.clone())
    with torch.inference_mode():
        expected = model(tokens[None, :-1]).logits[0]
    assert relative(logits(weights, filled.hidden), expected[: count - 1]) < LOGITS_PRETRAINED
    assert relative(torch.stack(rows), expected[count - 1 :]) < LOGITS_PRETRAINED
    # One pass over our tokens: each is transformers' own choice after those before it, so by induction all 64 are.
    assert tokens[count:].tolist() == expected[count - 1 :].argmax(-1).tolist()
    assert len(set(tokens[count:].tolist())) > 10


def test_fault_29_its_tokenizer_wants_no_bos(pretrained: tuple[Weights, Any, torch.Tensor]) -> None:
    tokenizer = models.load_tokenizer(str(embedded.path()))
    assert tokenizer.bos_token_id == 1 and prompts.beginning(tokenizer) == []
    ids = pretrained[2].tolist()
    assert 1 not in ids and tokenizer.decode(ids) == TEXT
    assert ids[:8] == [49, 26420, 1833, 12927, 897, 2613, 282, 260] and len(ids) == 45
