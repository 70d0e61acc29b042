"""Which path the next token takes: one look-up in a table, made at the end of a step on the GPU.

A captured graph cannot choose between launches, so the host does. It has to know that the step before is done, as
whoever reads the token has to; beyond that it reads one number from its own memory, where the step left it.
"""

from __future__ import annotations

import torch

from kernels import Launch, token


class Route:
    """table (V,) bool, tokens (capacity,) int64 and position (1,) int32 of a decoder, all on one device.

    launch: the look-up for the token at `position`, to run at the end of a step; past the last token it says no.
    """

    def __init__(self, table: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor) -> None:
        self._inputs = (tokens, position)
        self._device = tokens.device
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=tokens.is_cuda)
        self.launch: Launch = token.bind_route(tokens, position, table, self._flag)
        self._looked_up: tuple[int, ...] | None = None

    @property
    def rides(self) -> bool:
        """Whether the look-up belongs into the step: on a CPU it costs nothing when it is asked for."""
        return self._device.type == "cuda"

    def forget(self) -> None:
        """Look the next token up anew, whoever wrote it."""
        self._looked_up = None

    def taken(self) -> bool:
        """Whether the token at `position` takes the branch; looked up anew where torch wrote to tokens or position.

        Kernels write unseen: after steps of another decoder over the same tokens, `forget` first.
        """
        if not self.rides:
            self.launch()
            return bool(self._flag)
        versions = None if any(one.is_inference() for one in self._inputs) else tuple(o._version for o in self._inputs)
        if versions is None or versions != self._looked_up:
            self.launch()
            self._looked_up = versions
        torch.cuda.current_stream(self._device).synchronize()
        return bool(self._flag)
