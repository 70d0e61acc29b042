"""A request mix as data: kinds of requests with their shares and distributions of lengths (crossover, section 5.4).

The file states everything; the same file and window give the same requests on every machine. Lengths are drawn by
inverting the distribution at evenly spread quantiles in shuffled order, so that a few hundred requests follow it
closely. An agent loop is one request of several decodes, each with a longer prompt than the one before.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from artifact.checks import count, finite, in_range
from artifact.errors import UserError

DEFAULT = Path(__file__).resolve().parent / "mixes" / "chat-documents-agents.json"
SCHEMA = 1
LIMIT = 100_000  # requests, turns


@dataclass(frozen=True)
class Lengths:
    """Log-normal token counts: median, sigma of the natural logarithm, cut to [low, high]."""

    median: float
    sigma: float
    low: int
    high: int

    def at(self, quantile: float, scale: float = 1.0) -> int:
        """The length at a quantile in (0, 1), scaled; at least one token."""
        value = self.median * math.exp(self.sigma * NormalDist().inv_cdf(quantile))
        return max(1, round(min(max(value, self.low), self.high) * scale))


@dataclass(frozen=True)
class Kind:
    """One kind of request: its share of all requests, decodes per request and the lengths that each adds."""

    name: str
    share: float
    turns: int
    prompt_tokens: Lengths
    observation_tokens: Lengths
    new_tokens: Lengths


@dataclass(frozen=True)
class Mix:
    """A request mix; prompt lengths are stated for a window of `window_tokens`."""

    name: str
    window_tokens: int
    seed: int
    requests: int
    kinds: tuple[Kind, ...]

    def decodes(self, window: int) -> list[tuple[str, int, int]]:
        """Every decode of every request as (kind, prompt tokens, new tokens), prompts scaled to the model's window.

        A decode that would pass the window has its prompt cut: older turns and the document's end are what a server
        drops. New tokens are at most half of the window.
        """
        scale = window / self.window_tokens
        found = []
        for kind in self.kinds:
            number = round(kind.share * self.requests)
            order = random.Random(f"{self.seed}|{kind.name}")
            prompts = _shuffled(number, order)
            observed, new = _shuffled(number * kind.turns, order), _shuffled(number * kind.turns, order)
            for i in range(number):
                prompt = kind.prompt_tokens.at(prompts[i], scale)
                for turn in range(i * kind.turns, (i + 1) * kind.turns):
                    answer = min(kind.new_tokens.at(new[turn]), window // 2)
                    prompt = min(prompt, window - answer)
                    found.append((kind.name, prompt, answer))
                    prompt += answer + kind.observation_tokens.at(observed[turn], scale)
        return found

    def describe(self) -> str:
        """One line: shares and median lengths."""
        return "; ".join(
            f"{kind.share:.0%} {kind.name} ({kind.turns} x {kind.new_tokens.median:g} tokens after "
            f"{kind.prompt_tokens.median:g} of {self.window_tokens})"
            for kind in self.kinds
        )


def _shuffled(count: int, order: random.Random) -> list[float]:
    """Evenly spread quantiles in random order."""
    quantiles = [(i + 0.5) / count for i in range(count)]
    order.shuffle(quantiles)
    return quantiles


def load(path: Path | str = DEFAULT) -> tuple[Mix, dict[str, Any]]:
    """A mix and its record as stored in rows. Raises UserError naming what is wrong with the file."""
    name = Path(path).name
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"request mix {name} cannot be read as JSON ({type(error).__name__}); give a mix file"
        ) from None
    if not isinstance(record, dict):
        raise UserError(
            f"request mix {name} holds no JSON object; copy artifact/deploy/mixes/{DEFAULT.name} and change it"
        )
    return from_record(record, name), record


def from_record(record: Mapping[str, Any], name: str = "of a stored row") -> Mix:
    """The mix of a record. Raises UserError naming what is missing or outside its range."""
    try:
        if record["schema"] != SCHEMA:
            raise UserError(f"request mix {name} has schema {record['schema']}, this version reads {SCHEMA}")
        kinds = tuple(_kind(one) for one in record["kinds"])
        mix = Mix(str(record["name"]), record["window_tokens"], record["seed"], record["requests"], kinds)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"request mix {name} lacks {error}; copy artifact/deploy/mixes/{DEFAULT.name} and change it"
        ) from None
    count("window_tokens", mix.window_tokens, 1)
    if count("requests", mix.requests, 1) > LIMIT:
        raise UserError(f"requests is {mix.requests}; give at most {LIMIT}")
    total = sum(kind.share for kind in mix.kinds)
    if not math.isclose(total, 1.0, abs_tol=1e-9):
        raise UserError(f"the shares of request mix {name} add up to {total:g}; they must add up to 1")
    if not mix.decodes(mix.window_tokens):
        raise UserError(f"request mix {name} makes no request of any kind; give more requests or larger shares")
    return mix


def _kind(record: Mapping[str, Any]) -> Kind:
    if count("turns", record["turns"], 1) > LIMIT:
        raise UserError(f"turns is {record['turns']}; give at most {LIMIT}")
    return Kind(
        str(record["name"]),
        in_range("share", record["share"], 0, 1),
        record["turns"],
        *(_lengths(key, record[key]) for key in ("prompt_tokens", "observation_tokens", "new_tokens")),
    )


def _lengths(what: str, record: Mapping[str, Any]) -> Lengths:
    made = Lengths(record["median"], record["sigma"], record["low"], record["high"])
    count(f"{what} low", made.low, 1)
    if not made.low <= finite(f"{what} median", made.median) <= count(f"{what} high", made.high, made.low):
        raise UserError(f"{what} has median {made.median} outside [{made.low}, {made.high}]; give one inside")
    if finite(f"{what} sigma", made.sigma) < 0:
        raise UserError(f"{what} has sigma {made.sigma}; give 0 or more")
    return made
