"""Dense attention as others run it, for claims about baselines: the library's paths behind the signature of our own
kernel.

    splitk   our split-K decode kernel, reading only live entries, KV heads once
    fused    torch's fused attention over the live entries, without a split over keys
    masked   torch's attention with a mask over the whole allocation and KV heads repeated for every query head

Which implementation torch really runs is probed and recorded: a fused path that falls back to plain matrix products
is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import Launch, attention
from kernels.selection import Selection

Bind = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, "Selection | None"], Launch
]


def bind_fused(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    select: Selection | None = None,
) -> Launch:
    """Bind torch's flash attention over the live entries; arguments as `kernels.attention.bind`, equal lengths per
    head.
    """
    result = out.view(1, query.shape[0], 1, query.shape[1])
    asked = query.to(keys.dtype)[None, :, None]

    def fused() -> None:
        live = int(lengths[0]) + 1
        asked.copy_(query[None, :, None])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            result.copy_(
                functional.scaled_dot_product_attention(
                    asked, keys[None, :, :live], values[None, :, :live], scale=scale, enable_gqa=True
                )
            )

    return fused


def bind_masked(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    select: Selection | None = None,
) -> Launch:
    """Bind torch's attention with a mask over the whole allocation and repeated KV heads, as eager model code runs
    it.
    """
    heads, dim = query.shape
    group = heads // keys.shape[0]
    result = out.view(1, heads, 1, dim)
    slots = torch.arange(keys.shape[1], device=keys.device)
    # A mask hides a slot's score, not its value: 0 x NaN would still reach the output from slots never written.
    keys[:, int(lengths[0]) :].zero_()
    values[:, int(lengths[0]) :].zero_()

    def masked() -> None:
        mask = (slots <= lengths[0])[None, None, None]
        k, v = keys.repeat_interleave(group, 0)[None], values.repeat_interleave(group, 0)[None]
        asked = query.to(keys.dtype)[None, :, None]
        result.copy_(functional.scaled_dot_product_attention(asked, k, v, attn_mask=mask, scale=scale))

    return masked


PATHS: dict[str, Bind] = {"splitk": attention.bind, "fused": bind_fused, "masked": bind_masked}


def backend_name(path: str, query: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor) -> str:
    """Return the implementation that `path` runs for these tensors, probed from torch itself for its own paths."""
    if path == "splitk":
        return "triton split-k" if keys.is_cuda else "numba split-k"
    asked = query.to(keys.dtype)[None, :, None]
    if path == "fused":
        live = int(lengths[0]) + 1
        choice = torch._fused_sdp_choice(asked, keys[None, :, :live], keys[None, :, :live], enable_gqa=True)
        if SDPBackend(choice) == SDPBackend.MATH:
            raise RuntimeError("the fused path would run torch's math backend here; its time would not be a fused time")
        return f"torch {SDPBackend(choice).name.lower()}"
    repeated = keys.repeat_interleave(query.shape[0] // keys.shape[0], 0)[None]
    mask = torch.ones(1, 1, 1, keys.shape[1], dtype=torch.bool, device=keys.device)
    choice = torch._fused_sdp_choice(asked, repeated, repeated, attn_mask=mask)
    return f"torch {SDPBackend(choice).name.lower()} with mask over {keys.shape[1]} slots"
