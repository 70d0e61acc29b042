"""Dense attention as others run it, for claims about baselines: the library's paths behind the signature of our own
kernel.

    splitk       our split-K decode kernel, reading only live entries, KV heads once; rotation and append ride on it
    flash_attn   flash-attn's flash_attn_with_kvcache, the paper's split-K kernel, where that package is installed
    fused        torch's fused attention over the live entries
    masked       torch's attention with a mask over the whole allocation and KV heads repeated for every query head

Which implementation torch really runs is probed and recorded: a fused path that falls back to plain matrix products
is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import Launch

OWN = "splitk"
PATHS = (OWN, "fused", "masked")
FLASH_ATTN = "flash_attn"


@cache
def flash_attn_kvcache() -> Callable[..., Any] | None:
    """Return flash-attn's decode attention, or None where the package is not installed or does not load."""
    try:
        found: Callable[..., Any] = importlib.import_module("flash_attn").flash_attn_with_kvcache
    except (ImportError, OSError, AttributeError):
        return None
    return found


def paths_here(device: str) -> tuple[str, ...]:
    """Names of the attention paths that run on `device` here, the wasteful first and our own last."""
    flash = (FLASH_ATTN,) if device == "cuda" and flash_attn_kvcache() is not None else ()
    return ("masked", "fused", OWN, *flash)


class LibraryAttention:
    """Binds one library path for all layers of a decoder. Layers are bound and launched in order, equal lengths per
    head.

    torch's fused call takes its length from the host: layer 0 reads it from the device once per step, so such a step
    cannot be captured in a graph.
    """

    def __init__(self, path: str) -> None:
        binds = {"fused": self._fused, "masked": _masked, FLASH_ATTN: _flash_attn}
        if path not in binds:
            raise ValueError(f"no attention path is called {path!r}; there are {OWN}, {', '.join(binds)}")
        self._bind = binds[path]
        self._live = 0

    def bind(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> Launch:
        """Bind attention of one layer; the other arguments as `kernels.attention.bind`."""
        return self._bind(layer, query, keys, values, lengths, out, scale)

    def _fused(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> Launch:
        result = out.view(1, query.shape[0], 1, query.shape[1])
        asked = query.to(keys.dtype)[None, :, None]

        def fused() -> None:
            if layer == 0:
                self._live = int(lengths[0]) + 1
            asked.copy_(query[None, :, None])
            live = slice(0, self._live)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                result.copy_(
                    functional.scaled_dot_product_attention(
                        asked, keys[None, :, live], values[None, :, live], scale=scale, enable_gqa=True
                    )
                )

        return fused


def _masked(
    layer: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> Launch:
    """torch's attention with a mask over the whole allocation and repeated KV heads, as eager model code runs it."""
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


def _flash_attn(
    layer: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> Launch:
    """flash-attn over the live entries, the length read on the device; its splits over keys by its own heuristic."""
    attend = flash_attn_kvcache()
    if attend is None:
        raise RuntimeError("the flash_attn path was asked for, but the package flash-attn does not load here")
    heads, dim = query.shape
    result = out.view(1, 1, heads, dim)
    asked = query.to(keys.dtype)[None, None]
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    live = lengths[:1] + 1

    def flash() -> None:
        torch.add(lengths[:1], 1, out=live)
        asked.copy_(query[None, None])
        result.copy_(attend(asked, k, v, cache_seqlens=live, softmax_scale=scale))

    return flash


def capturable(path: str) -> bool:
    """Whether a step with this attention can be captured in a CUDA graph."""
    return path != "fused"


def backend_name(path: str, query: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor) -> str:
    """Return the implementation that `path` runs for these tensors, probed from torch itself for its own paths."""
    if path == OWN:
        return "triton split-k" if keys.is_cuda else "numba split-k"
    if path == FLASH_ATTN:
        return f"flash-attn {importlib.import_module('flash_attn').__version__}"
    asked = query.to(keys.dtype)[None, :, None]
    if path == "fused":
        live = int(lengths[0]) + 1
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            choice = torch._fused_sdp_choice(asked, keys[None, :, :live], keys[None, :, :live], enable_gqa=True)
        if SDPBackend(choice) == SDPBackend.MATH:
            raise RuntimeError("the fused path would run torch's math backend here; its time would not be a fused time")
        return f"torch {SDPBackend(choice).name.lower()}"
    repeated = keys.repeat_interleave(query.shape[0] // keys.shape[0], 0)[None]
    mask = torch.ones(1, 1, 1, keys.shape[1], dtype=torch.bool, device=keys.device)
    choice = torch._fused_sdp_choice(asked, repeated, repeated, attn_mask=mask)
    return f"torch {SDPBackend(choice).name.lower()} with mask over {keys.shape[1]} slots"
