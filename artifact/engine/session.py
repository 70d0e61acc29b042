"""One sequence that is generated token by token and may change branch between any two steps (crossover, section 3.2).

All modes share one token buffer, one full cache and one position. A branch discards nothing: weights stay in memory,
the full cache keeps growing in every mode. The selection is scored once, from the prompt's own attention, when a mode
first asks for it; entries that other modes decoded meanwhile are then appended to it from the full cache, so that
neither direction of a switch computes anything again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from artifact.account import Mode
from artifact.deploy.gate_costs import SELECTING
from artifact.engine.cache import KVCache, PackedCache
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.engine.prefill import prefill
from artifact.errors import UserError
from artifact.kv.retain import budget
from artifact.kv.snapkv import SnapKV
from artifact.projection.teal import Calibration

PROJECTING = (Mode.PROJECTION, Mode.BOTH)


@dataclass(frozen=True)
class Stretch:
    """Steps that were decoded in one mode in a row, and bytes read per step.

    timed: how many of them `seconds` covers. The first step of a mode compiles, and on a GPU is not yet a graph.
    """

    mode: Mode
    steps: int
    timed: int
    seconds: float
    step_bytes: float

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of the timed steps; None without any."""
        return self.timed / self.seconds if self.timed else None


class Session:
    """A prompt and the tokens generated from it, greedily.

    prompt (n,) int64, n at least 2: its last token is read by the first decode step, so that every generated token
    comes from the mode in use. new_tokens: room for that many. r_p, r_kv: keep ratios of the branches; calibration may
    be None when no mode with sparse projections is used. Raises UserError when the tokens do not fit the window.
    """

    def __init__(
        self,
        weights: Weights,
        prompt: torch.Tensor,
        new_tokens: int,
        calibration: Calibration | None,
        r_p: float,
        r_kv: float,
    ) -> None:
        length = int(prompt.shape[0])
        if length < 2:
            raise UserError(f"the prompt has {length} tokens; give at least 2")
        if length + new_tokens > weights.shape.window:
            raise UserError(
                f"{length} prompt and {new_tokens} new tokens exceed the model's window of {weights.shape.window}; "
                "ask for fewer or shorten the prompt"
            )
        self.weights, self.calibration, self.r_p, self.r_kv = weights, calibration, r_p, r_kv
        self.new_tokens = new_tokens
        self.tokens = torch.zeros(length + new_tokens, dtype=torch.int64, device=weights.device)
        self.tokens[:length] = prompt
        self._method = SnapKV()
        self._prefilled = length - 1
        begin = time.perf_counter()
        filled = prefill(weights, self.tokens[: length - 1], length - 1 + new_tokens, (length - 1,), self._method.rows)
        self.cache: KVCache = filled.cache
        self._queries: Sequence[torch.Tensor] = filled.queries[length - 1]
        self.prefill_seconds = time.perf_counter() - begin
        self.selection_seconds = 0.0
        self._packed: PackedCache | None = None
        self._decoders: dict[Mode, Decoder] = {}
        self._warm: set[Mode] = set()
        self._mode: Mode | None = None
        self._stretches: list[Stretch] = []
        self._steps = self._timed = 0
        self._seconds = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._prefilled + 1

    @property
    def mode(self) -> Mode | None:
        """The mode in use."""
        return self._mode

    def use(self, mode: Mode) -> None:
        """Decode the next steps in `mode`. Raises UserError when it needs a calibration that was not given."""
        if mode is self._mode:
            return
        self._close_stretch()
        if mode in SELECTING:
            self._catch_up()
        if mode not in self._decoders:
            self._decoders[mode] = self._decoder(mode)
        self._decoders[mode].reset_counts()
        self._mode = mode

    def step(self) -> int:
        """Decode one token in the mode in use and return it. Raises UserError when the room is used up."""
        if self._mode is None:
            raise RuntimeError("no mode was chosen; call use() before step()")
        decoder = self._decoders[self._mode]
        decoder.check_room(1)
        begin = time.perf_counter()
        decoder.step()
        token = int(self.tokens[self.cache.tokens])  # waits for the device
        self._steps += 1
        if self._mode in self._warm:
            self._timed += 1
            self._seconds += time.perf_counter() - begin
        else:
            self._warm.add(self._mode)
            if self.weights.device.type == "cuda":
                decoder.capture()
        return token

    def stretches(self) -> list[Stretch]:
        """What was decoded so far, mode by mode, the current one included."""
        self._close_stretch()
        return list(self._stretches)

    def _close_stretch(self) -> None:
        if self._mode is None or self._steps == 0:
            return
        decoder = self._decoders[self._mode]
        counted = decoder.counted()
        self._stretches.append(Stretch(self._mode, self._steps, self._timed, self._seconds, counted.step_bytes))
        self._steps = self._timed = 0
        self._seconds = 0.0
        decoder.reset_counts()

    def _decoder(self, mode: Mode) -> Decoder:
        thresholds = None
        if mode in PROJECTING:
            if self.calibration is None:
                raise UserError(f"mode {mode.value} needs calibrated thresholds; calibrate on text first")
            thresholds = self.calibration.thresholds(self.r_p)
        packed = self._packed if mode in SELECTING else None
        return Decoder(self.weights, self.cache, self.tokens, thresholds, packed, greedy=True)

    def _catch_up(self) -> None:
        """Select from the prompt if that was not done, then append what the full cache got since."""
        if self._packed is None:
            begin = time.perf_counter()
            prompt = self.cache.share(self._prefilled)
            scale = self.weights.shape.head_dim**-0.5
            self._packed = self._method.select(prompt, self._queries, self.r_kv, scale, self.new_tokens)
            self.selection_seconds = time.perf_counter() - begin
        packed = self._packed
        kept = budget(self._prefilled, self.r_kv)
        seen = self._prefilled + int(packed.lengths[0, 0]) - kept
        now = self.cache.tokens
        if seen < now:
            for layer in range(self.cache.keys.shape[0]):
                keys, values = self.cache.keys[layer], self.cache.values[layer]
                packed.append(layer, keys[:, seen:now], values[:, seen:now])
