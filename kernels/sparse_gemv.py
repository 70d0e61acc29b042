"""Sparse matrix-vector product: channels whose activation is small are not read (TEAL; crossover, section 3.2).

    y_n = sum over {i : not |z_i| <= t_s} of z_i w_in[i, n] + b[n],   n in column segment s,   z = n(x)
    y_n += ...                                                       with `accumulate`

Bytes moved: sum over segments of kept_s (columns of s) s_w. Weights are input-major: a skipped channel is a skipped
contiguous row. NaN is not "small": it is read, so a broken activation shows in the output.
"""

from __future__ import annotations

import itertools

import torch

from kernels import Launch, ShapeError, backend, require_shape
from kernels.norm import Norm, require_norm
from kernels.selection import Selection, mask


def reference(
    x: torch.Tensor,
    w_in: torch.Tensor,
    thresholds: torch.Tensor,
    segments: tuple[int, ...],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the thresholded product in the dtype of the inputs; x (K,), w_in (K, N), thresholds (S,)."""
    pieces = []
    for s, (low, high) in enumerate(itertools.pairwise(segments)):
        chosen = mask(x, thresholds[s].to(x.dtype))
        pieces.append(x[chosen] @ w_in[chosen, low:high])
    y = torch.cat(pieces)
    return y if bias is None else y + bias


def bytes_moved(w_in: torch.Tensor, selection: Selection) -> int:
    """Return the weight bytes that the last call read, from the counts that the kernel left in `selection.kept`."""
    widths = [high - low for low, high in zip(selection.segments, selection.segments[1:], strict=False)]
    return sum(int(k) * width for k, width in zip(selection.kept.tolist(), widths, strict=True)) * w_in.element_size()


def bind(
    x: torch.Tensor,
    w_in: torch.Tensor,
    y: torch.Tensor,
    select: Selection,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    accumulate: bool = False,
) -> Launch:
    """Bind the thresholded product for one token, written to y or, when `accumulate`, added to it.

    x (K,) float32, w_in (K, N), y (N,) float32, select with segments ending at N, bias (N,) or None, norm applied to x
    before it is compared with the thresholds. Raises ShapeError for a batch of tokens: their active channels differ,
    and one mask would silently be applied to all.
    """
    if x.dim() != 1:
        raise ShapeError(f"x has shape {tuple(x.shape)}; sparse_gemv takes one token, shape (K,)")
    depth, columns = w_in.shape
    require_shape("x", x, (depth,))
    require_shape("w_in", w_in, (depth, columns))
    require_shape("y", y, (columns,))
    if select.segments[-1] != columns:
        raise ShapeError(f"segments end at {select.segments[-1]}, the weight has {columns} columns")
    if bias is not None:
        require_shape("bias", bias, (columns,))
    require_norm(norm, depth)
    return backend("sparse_gemv", w_in).bind(x, w_in, y, select, bias, norm, accumulate)
