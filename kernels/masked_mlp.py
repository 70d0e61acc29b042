"""Up projection of the gated MLP, read only where the gate lets it through (CATS; sats, section on thresholding).

    s_i = silu(g_i),   kept: not |s_i| <= t,   act_i = s_i (w_i . z) where kept, 0 elsewhere,   z = n(x)

g comes from a dense product with the gate's rows. Row i of `w` is the up projection of intermediate channel i, a
contiguous row that is not touched where the channel is dropped; the down projection then skips the zeros of `act`.

`LowRank` adds the update of an adapter (W + B A) inside the same launch: the products
A_gate z and A_up z arrive behind g, B is applied to the kept rows, and A_down act leaves behind `act`, where the down
projection finds it.

Bytes moved: kept_rows K s_w, and with an update I r s for B_gate and 2 kept_rows r s for B_up and A_down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import Launch, ShapeError, backend, require_shape
from kernels.norm import Norm, require_norm
from kernels.selection import mask


@dataclass(frozen=True)
class LowRank:
    """Factors of rank r, scale included: gate_b and up_b (I, r), a row per output; down_a (I, r), a row per input."""

    gate_b: torch.Tensor
    up_b: torch.Tensor
    down_a: torch.Tensor

    @property
    def rank(self) -> int:
        return int(self.gate_b.shape[1])


def reference(
    gate: torch.Tensor, z: torch.Tensor, w: torch.Tensor, limit: float, low: LowRank | None = None
) -> torch.Tensor:
    """Return act (I + r,) in the dtype of the inputs; gate (I + 2r,), z (K,) normed, w (I, K)."""
    width, rank = w.shape[0], 0 if low is None else low.rank
    g, u = gate[:width], w @ z
    if low is not None:
        g = g + low.gate_b @ gate[width : width + rank]
        u = u + low.up_b @ gate[width + rank :]
    s = torch.nn.functional.silu(g)
    act = torch.where(mask(s, limit), s * u, torch.zeros((), dtype=z.dtype))
    return act if low is None else torch.cat((act, low.down_a.T @ act))


def bind(
    gate: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    act: torch.Tensor,
    limit: torch.Tensor,
    kept: torch.Tensor,
    norm: Norm | None = None,
    low: LowRank | None = None,
) -> Launch:
    """Bind the masked up projection of one token.

    gate (I + 2r,) float32, x (K,) float32, w (I, K), act (I + r,) float32 output, limit (1,) float32, norm applied to x
    while reading. kept (1,) int32 receives the rows read.
    """
    if x.dim() != 1:
        raise ShapeError(f"x has shape {tuple(x.shape)}; masked_mlp takes one token, shape (K,)")
    width, depth = w.shape
    rank = 0 if low is None else low.rank
    require_shape("x", x, (depth,))
    require_shape("w", w, (width, depth))
    require_shape("gate", gate, (width + 2 * rank,))
    require_shape("act", act, (width + rank,))
    require_shape("limit", limit, (1,))
    require_shape("kept", kept, (1,))
    require_norm(norm, depth)
    if low is not None:
        for name in ("gate_b", "up_b", "down_a"):
            require_shape(name, getattr(low, name), (width, rank))
    return backend("masked_mlp", w).bind(gate, x, w, act, limit, kept, norm, low)
