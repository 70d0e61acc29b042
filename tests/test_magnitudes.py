"""Quantiles of |x| from a histogram whose bins follow the numbers themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from artifact.projection.magnitudes import Magnitudes
from tests.inputs import NAN, draw
from tests.tolerances import KEEP_POINT

COUNT = 100_000


def exponential() -> torch.Tensor:
    return -torch.rand(COUNT, generator=torch.Generator().manual_seed(0)).log()


def shifted_normal() -> torch.Tensor:
    return draw(COUNT) * 0.3 + 2.0


def spike_at_zero() -> torch.Tensor:
    x = draw(COUNT)
    x[: COUNT // 4] = 0.0
    return x


def outliers() -> torch.Tensor:
    x = draw(COUNT)
    x[::500] *= 1e4
    return x


def negative_only() -> torch.Tensor:
    return -exponential() * 1e-6


@pytest.mark.parametrize("keep", [0.05, 0.25, 0.4, 0.5, 0.7])
@pytest.mark.parametrize("make", [exponential, shifted_normal, spike_at_zero, outliers, negative_only])
def test_fault_06_counted_keep_is_within_a_point_of_the_request(make: Callable[[], torch.Tensor], keep: float) -> None:
    x, seen = make(), Magnitudes()
    for chunk in x.split(7001):
        seen.add(chunk)
    threshold = seen.quantile(torch.tensor([1.0 - keep]))
    counted = float((x.abs() > threshold).float().mean())
    assert abs(counted - keep) < KEEP_POINT
    # Far finer than the point demanded: a bin is 0.2% wide.
    exact = np.quantile(x.abs().numpy(), 1.0 - keep)
    assert float(threshold) == pytest.approx(float(exact), rel=4e-3)


def test_fault_06_more_zeros_than_the_request_skips_gives_threshold_zero() -> None:
    seen = Magnitudes()
    seen.add(spike_at_zero())
    assert seen.quantile(torch.tensor([0.0, 0.1, 0.24])).tolist() == [0.0, 0.0, 0.0]
    assert float(seen.quantile(torch.tensor([0.26]))) > 0.0


def test_quantiles_rise_and_end_above_the_largest() -> None:
    x, seen = outliers(), Magnitudes()
    seen.add(x)
    table = seen.quantile(torch.linspace(0, 1, 1001, dtype=torch.float64))
    assert bool((table[1:] >= table[:-1]).all()) and seen.total == COUNT
    assert float(x.abs().max()) <= float(table[-1]) <= 1.004 * float(x.abs().max())


def test_adding_in_parts_is_adding_at_once_whatever_the_shape() -> None:
    x = draw(60, 50)
    parts, whole = Magnitudes(), Magnitudes()
    for part in x.split(7):
        parts.add(part)
    whole.add(-x.T)
    shares = torch.linspace(0, 1, 11)
    assert torch.equal(parts.quantile(shares), whole.quantile(shares)) and parts.total == whole.total == 3000


@pytest.mark.parametrize("bad", [NAN, -NAN, float("inf"), float("-inf")])
def test_fault_08_nan_and_inf_cannot_be_calibrated_on(bad: float) -> None:
    x = draw(100)
    x[3] = bad
    with pytest.raises(RuntimeError, match="NaN or inf"):
        Magnitudes().add(x)


def test_the_extremes_of_float32_have_bins() -> None:
    seen = Magnitudes()
    seen.add(torch.tensor([0.0, 1e-45, 1e-38, 3.4e38]))
    assert seen.total == 4 and float(seen.quantile(torch.tensor([1.0]))) >= 3.4e38
