"""The windows of a run: the paper's where the model's window holds them, halved where it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from artifact.errors import UserError
from artifact.measure import quality, quality_cells
from artifact.measure.configuration import Configuration
from artifact.measure.quality import Protocol
from artifact.measure.quality_plan import PAPER, fitted


@pytest.mark.parametrize(("window", "context"), [(131072, 32768), (33281, 32768), (33280, 16384), (8192, 4096)])
def test_contexts_are_halved_until_a_whole_window_fits(window: int, context: int) -> None:
    found = fitted(PAPER, window)
    assert found == Protocol(context, PAPER.scored_tokens, PAPER.windows) and found.window_tokens <= window


def test_a_model_too_short_to_score_is_refused() -> None:
    with pytest.raises(UserError, match="a window of 512 tokens cannot score 512"):
        fitted(PAPER, 512)


@pytest.mark.parametrize(("differences", "calls"), [([1e-5], 1), ([0.06, 1e-5], 2), ([0.06, 0.06, 0.06], 3)])
def test_one_window_of_three_must_agree_with_its_decode_steps(
    monkeypatch: pytest.MonkeyPatch, differences: list[float], calls: int
) -> None:
    left = iter(differences)
    prompt = SimpleNamespace(cache=None, queries=None)
    cut = SimpleNamespace(tokens=torch.zeros(5, 8, dtype=torch.int64), hash="h", bos=None)
    monkeypatch.setattr(quality, "windows", lambda *_: cut)
    monkeypatch.setattr(quality, "check_calibration", lambda *_: None)
    monkeypatch.setattr(quality, "stepwise_difference", lambda *_: next(left))
    monkeypatch.setattr(quality, "score", lambda *_: {"nll": [1.0]})
    monkeypatch.setattr(quality_cells, "prefilled", lambda *_: prompt)
    bench: Any = SimpleNamespace(
        weights=SimpleNamespace(dtype=torch.float32), tokenizer=None, calibration_tokens=None, text_label="a text",
        evaluation_text=SimpleNamespace(text="", name=""), calibration=SimpleNamespace(tokens_hash="c"),
        say=lambda *_: None,
    )  # fmt: skip
    params = {"arms": [Configuration(r_p=0.5).record()], "context": 4, "scored": 2, "windows": 5, "chosen": range(5)}
    if differences[-1] > 0.05:
        with pytest.raises(RuntimeError, match="differs from decode steps"):
            list(quality_cells._scored(bench, params))
    else:
        rows = list(quality_cells._scored(bench, params))
        assert [row["stepwise_difference_nats"] for row in rows[:calls]] == differences and len(rows) == 5
    assert not list(left)
