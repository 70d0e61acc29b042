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


def bind_advance(
    position: torch.Tensor,
    lengths: list[torch.Tensor],
    entries: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor] | None,
) -> Launch:
    """Bind the end of a step: sum what was read, then move every counter on."""
    counters = [array("counter", counter, torch.int32) for counter in (position, *lengths)]
    attended, attended_total = array("attended", entries[0], torch.int32), array("total", entries[1], torch.int64)
    channels = None if kept is None else (array("kept", kept[0], torch.int32), array("total", kept[1], torch.int64))

    def advance() -> None:
        np.add(attended_total, attended, out=attended_total)
        np.add(attended_total, 1, out=attended_total)
        if channels is not None:
            np.add(channels[1], channels[0], out=channels[1])
        for counter in counters:
            np.add(counter, 1, out=counter)

    return advance


def bind_route(tokens: torch.Tensor, position: torch.Tensor, table: torch.Tensor, flag: torch.Tensor) -> Launch:
    """Bind flag = table[tokens[position]], zero past the end."""
    ids, where = array("tokens", tokens, torch.int64), array("position", position, torch.int32)
    routed, out = array("table", table, torch.bool), array("flag", flag, torch.int32)

    def route() -> None:
        out[0] = where[0] < len(ids) and routed[ids[where[0]]]

    return route
