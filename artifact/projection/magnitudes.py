"""Streaming distribution of |x|, in memory that does not grow with the number of activations.

The bit pattern of a non-negative float32 grows with its value, so its leading bits are a histogram bin of constant
relative width: 9 mantissa bits give 0.2% per bin, finer than a keep ratio can resolve. No range has to be guessed and
no symmetry is assumed.
"""

from __future__ import annotations

import torch

SHIFT = 14  # float32 has 23 mantissa bits; 9 stay
BINS = 1 << (31 - SHIFT)
FINITE = 0x7F800000 >> SHIFT  # first bin of inf and NaN


class Magnitudes:
    """Counts of |x| per bin; `add` any number of times, then `quantile`."""

    def __init__(self) -> None:
        self._counts = torch.zeros(BINS, dtype=torch.int64)

    def add(self, values: torch.Tensor) -> None:
        """Add all elements of `values` (any shape). Raises RuntimeError on NaN or inf: a quantile of those means
        nothing.
        """
        bits = values.detach().float().abs().contiguous().view(torch.int32).flatten() >> SHIFT
        self._counts += torch.bincount(bits, minlength=BINS).cpu()
        if bool(self._counts[FINITE:].any()):
            raise RuntimeError("activations hold NaN or inf; thresholds cannot be calibrated on them")

    @property
    def total(self) -> int:
        return int(self._counts.sum())

    def quantile(self, share: torch.Tensor) -> torch.Tensor:
        """Return the values below or at which the given shares (m,) of the elements lie; linear inside a bin."""
        cumulative = self._counts.cumsum(0).double()
        target = share.double() * cumulative[-1]
        index = torch.searchsorted(cumulative, target).clamp(max=FINITE - 1)
        before = torch.where(index > 0, cumulative[(index - 1).clamp(min=0)], torch.zeros_like(target))
        inside = ((target - before) / self._counts[index].clamp(min=1)).clamp(0.0, 1.0)
        edges = torch.stack((index, index + 1)).to(torch.int32) << SHIFT
        low, high = edges.view(torch.float32).double()
        # Bin 0 holds the exact zeros: they are all "at or below 0", not spread over the bin.
        return torch.where(index == 0, torch.zeros_like(low), low + inside * (high - low)).float()
