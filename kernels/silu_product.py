"""The product of a gated MLP where its projections are an operation of their own: batched and quantised steps.

    act[b, i] = silu(both[b, i]) both[b, I + i],   silu(g) = g / (1 + exp(-g))

Bytes moved: activations only, which are noise beside weights.
"""

from __future__ import annotations

import torch

from kernels import Launch, ShapeError, backend, require_shape


def reference(both: torch.Tensor) -> torch.Tensor:
    """Return (B, I) in the dtype of both (B, 2I), gate first."""
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def bind(both: torch.Tensor, act: torch.Tensor) -> Launch:
    """Bind the product; both (B, 2I) and act (B, I), float32."""
    if both.dim() != 2 or both.shape[1] % 2:
        raise ShapeError(f"both has shape {tuple(both.shape)}, expected (B, 2I)")
    require_shape("both", both, tuple(both.shape))
    require_shape("act", act, (both.shape[0], both.shape[1] // 2))
    return backend("silu_product", both).bind(both, act)
