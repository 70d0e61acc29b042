"""The windows of a run: the paper's where the model's window holds them, halved where it does not."""

from __future__ import annotations

import pytest

from artifact.errors import UserError
from artifact.measure.quality import Protocol
from artifact.measure.quality_plan import PAPER, fitted


@pytest.mark.parametrize(("window", "context"), [(131072, 32768), (33281, 32768), (33280, 16384), (8192, 4096)])
def test_contexts_are_halved_until_a_whole_window_fits(window: int, context: int) -> None:
    found = fitted(PAPER, window)
    assert found == Protocol(context, PAPER.scored_tokens, PAPER.windows) and found.window_tokens <= window


def test_a_model_too_short_to_score_is_refused() -> None:
    with pytest.raises(UserError, match="a window of 512 tokens cannot score 512"):
        fitted(PAPER, 512)
