"""Token bookkeeping of a step: embed the current token, choose the next, move on.

    embed:   x = table[tokens[position]]                  (H s_w bytes)
    argmax:  tokens[position + 1] = argmax(logits)
    advance: sum the cache entries and channels that this step read, then position += 1, every length += 1
    route:   flag = table[tokens[position]]

All counters live on the device, so a captured graph serves every position.
"""

from __future__ import annotations

import torch

from kernels import Launch, backend, require_shape


def bind_embed(tokens: torch.Tensor, position: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> Launch:
    """Bind the embedding of one token.

    tokens (capacity,) int64, position (1,) int32, table (V, H), out (H,) float32.
    """
    require_shape("position", position, (1,))
    require_shape("out", out, (table.shape[1],))
    return backend("token", table).bind_embed(tokens, position, table, out)


def bind_argmax(logits: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor) -> Launch:
    """Bind greedy choice: logits (V,) float32; the id goes to tokens[position + 1]."""
    require_shape("position", position, (1,))
    return backend("token", logits).bind_argmax(logits, tokens, position)


def bind_advance(
    position: torch.Tensor,
    lengths: list[torch.Tensor],
    entries: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Launch:
    """Bind the end of a step: entries_total += attended + 1, kept_total += kept, then position and all lengths += 1.

    position (1,) int32; lengths: (L, kv_heads) int32 tensors; entries: (attended lengths int32, total int64) of one
    shape, where attended is one of `lengths`; kept: (channels read per projection int32, total int64) of one shape,
    None in a dense mode.
    """
    require_shape("position", position, (1,))
    for now, total in (entries, kept) if kept is not None else (entries,):
        require_shape("total", total, tuple(now.shape))
    return backend("token", position).bind_advance(position, lengths, entries, kept)


def bind_route(tokens: torch.Tensor, position: torch.Tensor, table: torch.Tensor, flag: torch.Tensor) -> Launch:
    """Bind the look-up of the token at `position`, zero past the end of `tokens`.

    tokens (capacity,) int64, position (1,) int32, table (V,) bool; flag (1,) int32 in memory of the host, pinned where
    the rest lies on a GPU.
    """
    require_shape("position", position, (1,))
    require_shape("flag", flag, (1,))
    return backend("token", table).bind_route(tokens, position, table, flag)
