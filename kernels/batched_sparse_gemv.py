"""Sparse product of a batch: a channel is read when any sequence activates it (crossover, section 3.3).

    y[b, n] = sum over {i : not |z[b, i]| <= t_s} of z[b, i] w_in[i, n] + bias[n],   n in segment s,   z = n(x)

Every sequence uses its own active channels only, so its result does not depend on its neighbours. Bytes moved: sum
over segments of |union over b of active channels| (columns of s) s_w: a share u_B of the weights, at least r_P.
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape, sparse_gemv
from kernels.batched_gemv import check_batch
from kernels.norm import Norm, require_norm
from kernels.selection import Selection, mask


def reference(
    x: torch.Tensor,
    w_in: torch.Tensor,
    thresholds: torch.Tensor,
    segments: tuple[int, ...],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product of every sequence by itself; x (B, K), w_in (K, N), thresholds (S,)."""
    return torch.stack([sparse_gemv.reference(one, w_in, thresholds, segments, bias) for one in x])


def union(x: torch.Tensor, thresholds: torch.Tensor) -> list[int]:
    """Return per threshold the number of channels that any sequence of x (B, K) activates."""
    return [int(mask(x, t).any(0).sum()) for t in thresholds.to(x.dtype)]


def bind(
    x: torch.Tensor,
    w_in: torch.Tensor,
    y: torch.Tensor,
    select: Selection,
    own: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    accumulate: bool = False,
) -> Launch:
    """Bind the thresholded product of a batch. x (B, K) float32, w_in (K, N), y (B, N) float32.

    select.kept (S,) receives the size of the union, own (B, S) int32 the channels that each sequence activates.
    """
    depth, columns = w_in.shape
    check_batch(x, depth)
    require_shape("w_in", w_in, (depth, columns))
    require_shape("y", y, (x.shape[0], columns))
    require_shape("own", own, (x.shape[0], len(select.segments) - 1))
    if select.segments[-1] != columns:
        raise ShapeError(f"segments end at {select.segments[-1]}, the weight has {columns} columns")
    if bias is not None:
        require_shape("bias", bias, (columns,))
    require_norm(norm, depth)
    return backend("batched_sparse_gemv", w_in).bind(x, w_in, y, select, own, bias, norm, accumulate)
