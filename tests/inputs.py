"""Seeded inputs for the kernel tests, hostile ones included, and the measures of error to be bounded."""

from __future__ import annotations

import torch

from kernels.selection import Selection

NAN = float("nan")
KINDS = ("normal", "wide", "cancelling", "outliers")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vector(kind: str, size: int, seed: int = 0) -> torch.Tensor:
    """A float32 vector of one kind.

    normal; wide: magnitudes spread over twelve decades; cancelling: pairs +a, -a with a small rest; outliers: a few
    channels a thousand times the others, as trained models have them.
    """
    x = draw(size, seed=seed)
    if kind == "wide":
        x = x.sign() * 10.0 ** (torch.rand(size, generator=torch.Generator().manual_seed(seed + 1)) * 12 - 6)
    if kind == "cancelling":
        half = size // 2
        x[half : 2 * half] = -x[:half] * (1 + 1e-5)
    if kind == "outliers":
        x[:: max(1, size // 5)] *= 1000.0
    return x


def dot_error(y: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> float:
    """Largest |y - expected| / magnitude, magnitude = sum |w||x| per output; NaN if anything is NaN."""
    return float(((y.double() - expected).abs() / magnitude.clamp(min=1e-300)).max())


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def selection(thresholds: list[float], segments: tuple[int, ...]) -> Selection:
    """A selection whose counts start at -1, so that a count nobody wrote shows."""
    kept = torch.full((len(thresholds),), -1, dtype=torch.int32)
    return Selection(torch.tensor(thresholds, dtype=torch.float32), segments, kept)


def filled(*shape: int) -> torch.Tensor:
    """An output that was not zeroed: NaN everywhere."""
    return torch.full(shape, NAN)
