"""transformers' own model in float64 with a gate mask on the MLP: the independent reference of the masked branch.

The mask, the adapter and the routing table act on rows from `prompt` on, as decode steps follow a dense prefill.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from artifact.projection.lora import Adapter


@dataclass(frozen=True)
class Masked:
    """limits (L,); routed (V,) booleans or None; adapter or None."""

    prompt: int
    limits: torch.Tensor
    routed: torch.Tensor | None = None
    adapter: Adapter | None = None


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor, how: Masked) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, V) float64 logits and, per layer, the neurons kept in every decode row (L, n - prompt)."""
    model = copy.deepcopy(model).double()
    rows = torch.arange(ids.shape[0]) >= how.prompt
    if how.routed is not None:
        rows &= how.routed[ids]
    kept = []

    def masked(layer: int, mlp: Any) -> Any:
        factors = None if how.adapter is None else how.adapter.layers[layer]

        def project(name: str, x: torch.Tensor) -> torch.Tensor:
            y = getattr(mlp, f"{name}_proj")(x)
            if factors is None:
                return y
            a, b = (one.double() for one in getattr(factors, name))
            return y + rows[None, :, None] * (x @ (b @ a).T)

        def forward(x: torch.Tensor) -> torch.Tensor:
            silu = torch.nn.functional.silu(project("gate", x))
            keep = (silu.abs() > float(how.limits[layer])) | ~rows[None, :, None]
            kept.append(keep[0, how.prompt :].sum(-1))
            return project("down", torch.where(keep, silu * project("up", x), 0.0))

        return forward

    for index, layer in enumerate(model.model.layers):
        layer.mlp.forward = masked(index, layer.mlp)
    found = model(ids[None]).logits[0]
    return found, torch.stack(kept)
