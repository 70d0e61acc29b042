"""Which input channels a sparse projection reads: one threshold per column segment, strict |x| > t (TEAL, section 3).

A fused weight (q|k|v or gate|up) has several column segments, each with a threshold of its own. `kept` receives the
number of channels every segment really read in the last step: the counted keep ratio is `kept / K`, never the
requested one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import ShapeError, require_shape


@dataclass(frozen=True)
class Selection:
    """Thresholds of one sparse projection.

    thresholds: (S,) float32, one per segment; 0 keeps every non-zero channel, a negative value keeps all.
    segments: S + 1 increasing column bounds, the first 0 and the last the output width N.
    kept: (S,) int32, written by the consumer: channels read per segment in the last step.
    """

    thresholds: torch.Tensor
    segments: tuple[int, ...]
    kept: torch.Tensor

    def __post_init__(self) -> None:
        count = len(self.segments) - 1
        if (
            count < 1
            or self.segments[0] != 0
            or any(a >= b for a, b in zip(self.segments, self.segments[1:], strict=False))
        ):
            raise ShapeError(f"segments {self.segments} must start at 0 and increase")
        require_shape("thresholds", self.thresholds, (count,))
        require_shape("kept", self.kept, (count,))


def mask(x: torch.Tensor, threshold: float | torch.Tensor) -> torch.Tensor:
    """Return the channels read, as booleans of x's shape. NaN is read: it must reach the output rather than vanish."""
    return ~(x.abs() <= threshold)
