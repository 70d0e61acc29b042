"""Which channels count as read, and what a selection accepts."""

from __future__ import annotations

import pytest
import torch

from kernels import ShapeError
from kernels.selection import Selection, mask
from tests.inputs import NAN


def test_the_comparison_is_strict_and_nan_is_read() -> None:
    x = torch.tensor([0.0, -0.0, 0.5, -0.5, 0.6, NAN, float("inf")])
    assert mask(x, 0.5).tolist() == [False, False, False, False, True, True, True]
    assert mask(x, 0.0).tolist() == [False, False, True, True, True, True, True]
    assert mask(x, -1.0).tolist() == [True] * 7


@pytest.mark.parametrize("segments", [(0,), (1, 5), (0, 5, 5), (0, 5, 3), ()])
def test_segments_start_at_zero_and_increase(segments: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="segments"):
        Selection(torch.zeros(max(1, len(segments) - 1)), segments, torch.zeros(1, dtype=torch.int32))


def test_one_threshold_and_one_count_per_segment() -> None:
    with pytest.raises(ShapeError, match="thresholds has shape"):
        Selection(torch.zeros(1), (0, 3, 5), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ShapeError, match="kept has shape"):
        Selection(torch.zeros(2), (0, 3, 5), torch.zeros(1, dtype=torch.int32))
