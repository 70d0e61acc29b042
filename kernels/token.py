"""Token bookkeeping of a step: embed the current token, choose the next, move on.

    embed:   x = table[tokens[position]]                  (H s_w bytes)
    argmax:  tokens[position + 1] = argmax(logits)
    advance: position += 1, every cache length += 1, total += kept   (the counted channels of this step)

All counters live on the device, so a captured graph serves every position.
"""

from __future__ import annotations

import torch

from kernels import Launch, backend, require_shape


def bind_embed(tokens: torch.Tensor, position: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> Launch:
    """Bind the embedding of one token: tokens (capacity,) int64, position (1,) int32, table (V, H), out (H,) float32."""
    require_shape("position", position, (1,))
    require_shape("out", out, (table.shape[1],))
    return backend("token", table).bind_embed(tokens, position, table, out)


def bind_argmax(logits: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor) -> Launch:
    """Bind greedy choice: logits (V,) float32; the id goes to tokens[position + 1]."""
    require_shape("position", position, (1,))
    return backend("token", logits).bind_argmax(logits, tokens, position)


def bind_advance(
    counters: list[torch.Tensor], kept: torch.Tensor | None = None, total: torch.Tensor | None = None
) -> Launch:
    """Bind the end of a step: every int32 counter += 1; total (int64) += kept (int32), both of one shape."""
    if kept is not None and total is not None:
        require_shape("total", total, tuple(kept.shape))
    return backend("token", counters[0]).bind_advance(counters, kept, total)
