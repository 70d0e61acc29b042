"""Matrix-vector product on quantised weights, dense and thresholded.

    y[n] = sum_k w[n, k] z_k + bias[n],   w as `kernels.quantised` stands for it,   z = n(x)
    y[n] = sum over {k : not |z_k| <= t_s} of w[n, k] z_k + bias[n]                 thresholded, n in segment s
    y[n] += ...                                                                     with `accumulate`

Bytes moved: all codes and scales, or kept_s (columns of s) bits / 8 and the scales. Activations stay float32.
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape, sparse_gemv
from kernels.norm import Norm, require_norm
from kernels.quantised import GROUP, Quantised, dequantise
from kernels.selection import Selection


def reference(x: torch.Tensor, weight: Quantised, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return w x + bias in the dtype of x (K,)."""
    y = dequantise(weight, x.dtype) @ x
    return y if bias is None else y + bias


def reference_sparse(
    x: torch.Tensor, weight: Quantised, thresholds: torch.Tensor, segments: tuple[int, ...],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the thresholded product in the dtype of x."""
    return sparse_gemv.reference(x, dequantise(weight, x.dtype).T, thresholds, segments, bias)


def bytes_moved(weight: Quantised, selection: Selection | None = None) -> float:
    """Return the bytes that a call reads: everything, or what the last thresholded call kept. Every group of 4-bit
    channels is taken to have an active one, so all scales count.
    """
    if selection is None:
        return float(weight.dense_bytes)
    widths = [high - low for low, high in zip(selection.segments, selection.segments[1:], strict=False)]
    kept = sum(int(k) * width for k, width in zip(selection.kept.tolist(), widths, strict=True))
    return kept * weight.row_bytes + 4 * weight.scales.numel()


def _check(x: torch.Tensor, weight: Quantised, y: torch.Tensor, bias: torch.Tensor | None, norm: Norm | None) -> None:
    require_shape("x", x, (weight.inputs,))
    require_shape("y", y, (weight.outputs,))
    if bias is not None:
        require_shape("bias", bias, (weight.outputs,))
    require_norm(norm, weight.inputs)


def bind(
    x: torch.Tensor,
    weight: Quantised,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    accumulate: bool = False,
) -> Launch:
    """Bind the dense product of one token. x (K,) float32, y (N,) float32, bias (N,)."""
    _check(x, weight, y, bias, norm)
    return backend("quant_gemv", weight.q).bind(x, weight, y, bias, norm, accumulate)


def bind_sparse(
    x: torch.Tensor,
    weight: Quantised,
    y: torch.Tensor,
    select: Selection,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    accumulate: bool = False,
) -> Launch:
    """Bind the thresholded product of one token; select with segments ending at N, in 4 bits multiples of 64."""
    _check(x, weight, y, bias, norm)
    if select.segments[-1] != weight.outputs:
        raise ShapeError(f"segments end at {select.segments[-1]}, the weight has {weight.outputs} outputs")
    if weight.bits == 4 and any(bound % GROUP for bound in select.segments):
        raise ShapeError(f"segments {select.segments} of a 4-bit weight must be multiples of {GROUP}")
    return backend("quant_gemv", weight.q).bind_sparse(x, weight, y, select, bias, norm, accumulate)
