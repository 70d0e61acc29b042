"""Token bookkeeping on the CPU: NumPy calls on vectors, one per step."""

from __future__ import annotations

import numpy as np
import torch

from kernels import Launch
from kernels.cpu.common import array


def bind_embed(tokens: torch.Tensor, position: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> Launch:
    """Bind out = table[tokens[position]]."""
    ids, where = array("tokens", tokens, torch.int64), array("position", position, torch.int32)
    rows, vector = array("table", table), array("out", out)

    def embed() -> None:
        vector[:] = rows[ids[where[0]]]

    return embed


def bind_argmax(logits: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor) -> Launch:
    """Bind tokens[position + 1] = argmax(logits), the lowest id among equals."""
    scores, ids = array("logits", logits), array("tokens", tokens, torch.int64)
    where = array("position", position, torch.int32)

    def argmax() -> None:
        ids[where[0] + 1] = np.argmax(scores)

    return argmax


def bind_advance(counters: list[torch.Tensor], kept: torch.Tensor | None, total: torch.Tensor | None) -> Launch:
    """Bind counter += 1 for every counter and total += kept."""
    arrays = [array("counter", counter, torch.int32) for counter in counters]
    added = None if kept is None else array("kept", kept, torch.int32)
    summed = None if total is None else array("total", total, torch.int64)

    def advance() -> None:
        for counter in arrays:
            counter += 1
        if added is not None and summed is not None:
            np.add(summed, added, out=summed)

    return advance
