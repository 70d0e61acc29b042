"""Decode-position perplexity as the paper defines it (crossover, section 4.1 and Appendix A): prefill a window densely,
then score the following tokens one at a time under the branch.

Windows are fixed, disjoint and the same for every arm. The raw samples are the negative log-likelihoods of each
window; perplexity and intervals are derived. Scoring takes the tokens of a window in one teacher-forced pass, which
equals scoring them step by step (`score_stepwise`, the reference that a test and every measurement check against).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from artifact.engine import prompts, teacher
from artifact.engine.cache import KVCache
from artifact.engine.decoder import Decoder
from artifact.engine.models import Weights
from artifact.errors import UserError
from artifact.measure import configuration as configurations
from artifact.measure.configuration import Calibrated, Configuration
from artifact.projection.teal import Calibration, hash_tokens
from artifact.stats import Interval

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
# The passes differ by float32 rounding alone.
STEPWISE_TOLERANCE_NATS = 0.01
# Mean over the compared tokens where projections are thresholded: a channel within rounding of its threshold falls on
# either side, and through all layers and the cache that moves single tokens by up to 0.05 nats.
THRESHOLDED_TOLERANCE_NATS = 0.05
# Half-precision attention rounds by 1e-3 where float32 rounds by 1e-6, so logits move more and more channels cross
# their thresholds (SmolLM2 in float16: 0.10 nats at 70% keep with 30% of the cache).
HALF_FACTOR = 4.0
BOOTSTRAP_DRAWS = 4000


@dataclass(frozen=True)
class Protocol:
    """context_tokens: length of the dense prefill; scored_tokens: how many tokens each window scores (the paper: 512);
    windows: how many.

    The token at the prefill's end is the first that a branch reads, so that every scored probability is the branch's.
    """

    context_tokens: int = 4096
    scored_tokens: int = 128
    windows: int = 8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise UserError(f"{name} is {value}; give at least 1")

    @property
    def window_tokens(self) -> int:
        """Tokens of one window: the prefill, the scored inputs and the last target."""
        return self.context_tokens + self.scored_tokens + 1


@dataclass(frozen=True)
class Windows:
    """tokens (windows, window_tokens) int64; bos: the one beginning-of-sequence id that each window starts with, if
    any; text: where they come from.
    """

    protocol: Protocol
    tokens: torch.Tensor
    bos: int | None
    text: str

    def first(self, windows: int, scored: int) -> Windows:
        """The beginning of the first of these windows: they share their prefills."""
        protocol = Protocol(self.protocol.context_tokens, scored, windows)
        return Windows(protocol, self.tokens[:windows, : protocol.window_tokens], self.bos, self.text)

    @property
    def hash(self) -> str:
        """Names everything that decides which probabilities are taken: tokens, positions, BOS and windows."""
        named = {**asdict(self.protocol), "bos": self.bos, "tokens": hash_tokens(self.tokens)}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]


def windows(tokenizer: PreTrainedTokenizerBase, text: str, protocol: Protocol, name: str) -> Windows:
    """Cut the beginning of `text` into disjoint windows. Raises UserError when the text is too short."""
    start = prompts.beginning(tokenizer)
    own = protocol.window_tokens - len(start)
    ids = prompts.encode_at_least(tokenizer, text, len(start) + own * protocol.windows, name)[len(start) :]
    cut = ids.view(protocol.windows, own)
    bos = torch.tensor(start, dtype=torch.int64).expand(protocol.windows, -1)
    return Windows(protocol, torch.cat((bos, cut), 1).contiguous(), start[0] if start else None, name)


def check_calibration(calibration: Calibration, windows_: Windows, calibration_tokens: torch.Tensor) -> None:
    """Raise UserError when thresholds were calibrated on text that the windows evaluate."""
    from artifact.projection.teal import require_disjoint

    if hash_tokens(calibration_tokens) != calibration.tokens_hash:
        raise UserError("the thresholds were calibrated on other tokens than those given for comparison")
    for window in windows_.tokens:
        require_disjoint(calibration_tokens, window)


def score(
    weights: Weights,
    calibration: Calibrated | None,
    cache: KVCache,
    queries: Sequence[torch.Tensor],
    window: torch.Tensor,
    configuration: Configuration,
) -> Row:
    """Score one prefilled window under a configuration and return its row: nll (scored,) in nats and what was read.

    cache holds window[:context]. Raises RuntimeError when the counted keep ratios are not those asked for.
    """
    context, scored = _split(cache, window)
    branch = configurations.bind(configuration, weights, calibration, cache, queries, 0)
    inputs, targets = window[context : context + scored], window[context + 1 :]
    block = teacher.forward(weights, cache, inputs, branch.thresholds, branch.packed)
    configurations.check_r_p(configuration, block.r_p)
    nll = teacher.token_nll(weights, block.hidden, targets.to(weights.device))
    retained = cache.tokens if branch.packed is None else float(branch.packed.lengths.double().mean())
    return {
        **configuration.record(),
        "nll": nll.tolist(),
        "counted_r_p": block.r_p,
        "counted_r_kv": retained / cache.tokens,
        "window_tokens_hash": hash_tokens(window),
    }


def score_stepwise(
    weights: Weights,
    calibration: Calibrated | None,
    cache: KVCache,
    queries: Sequence[torch.Tensor],
    window: torch.Tensor,
    configuration: Configuration,
    steps: int,
) -> list[float]:
    """Return the nll of the first `steps` scored tokens from real decode steps on a fork of the cache."""
    context, _ = _split(cache, window)
    fork = cache.fork(context, context + steps)
    branch = configurations.bind(configuration, weights, calibration, fork, queries, steps)
    tokens = window[: context + steps + 1].to(weights.device, copy=True)
    decoder = Decoder(weights, fork, tokens, branch.thresholds, branch.packed)
    decoder.check_room(steps)
    nll = []
    for step in range(steps):
        decoder.step()
        target = window[context + step + 1].to(weights.device)
        nll.append(float(functional.cross_entropy(decoder.logits.double(), target)))
    return nll


def refuse(configuration: Configuration, found: float) -> NoReturn:
    """Raise RuntimeError: a pass is no measure of a branch whose steps differ by `found` nats."""
    raise RuntimeError(f"{configuration.label}: scoring in one pass differs from decode steps by {found:.2e} nats")


def stepwise_difference(
    weights: Weights,
    calibration: Calibrated | None,
    cache: KVCache,
    queries: Sequence[torch.Tensor],
    window: torch.Tensor,
    configuration: Configuration,
    steps: int = 8,
) -> float:
    """Return the distance in nats between the pass and `steps` real decode steps: the largest, or the mean where
    projections are thresholded.
    """
    passed = score(weights, calibration, cache, queries, window, configuration)["nll"][:steps]
    stepped = score_stepwise(weights, calibration, cache, queries, window, configuration, steps)
    differences = [abs(a - b) for a, b in zip(passed, stepped, strict=True)]
    return sum(differences) / steps if configuration.r_p < 1 else max(differences)


def tolerance_nats(dtype: torch.dtype, thresholded: bool) -> float:
    """What rounding may move: the largest difference of any token, or the mean where channels are thresholded."""
    tolerance = THRESHOLDED_TOLERANCE_NATS if thresholded else STEPWISE_TOLERANCE_NATS
    return tolerance * (1.0 if dtype == torch.float32 else HALF_FACTOR)


def _split(cache: KVCache, window: torch.Tensor) -> tuple[int, int]:
    context = cache.tokens
    scored = int(window.shape[0]) - context - 1
    if scored < 1:
        raise UserError(f"a window of {window.shape[0]} tokens leaves nothing to score after {context}; lengthen it")
    return context, scored


Losses = dict[str, dict[int, list[float]]]


def losses(rows: Sequence[Mapping[str, Any]]) -> Losses:
    """Gather nll by label and window, and require every arm to have the same windows, tokens and counts.

    Raises ValueError naming the arm that differs: a window lost from one arm only biases the other.
    """
    found: Losses = {}
    identity: dict[int, tuple[str, int]] = {}
    protocols = {row["protocol"] for row in rows}
    if len(protocols) > 1:
        raise ValueError(f"rows of {len(protocols)} protocols cannot be compared")
    for row in rows:
        window = int(row["window"])
        seen = identity.setdefault(window, (row["window_tokens_hash"], len(row["nll"])))
        if seen != (row["window_tokens_hash"], len(row["nll"])):
            raise ValueError(f"{row['label']} scored other tokens of window {window} than the arm before it")
        if window in found.setdefault(row["label"], {}):
            raise ValueError(f"{row['label']} scored window {window} twice")
        found[row["label"]][window] = list(row["nll"])
    for label, own in found.items():
        if set(own) != set(identity):
            raise ValueError(f"{label} has windows {sorted(own)}, the run has {sorted(identity)}")
    return found


def window_means(found: Losses, label: str) -> list[float]:
    """Mean nll of every window of one arm, in window order."""
    return [math.fsum(found[label][w]) / len(found[label][w]) for w in sorted(found[label])]


def perplexity(found: Losses, label: str, seed: int = 0) -> Interval:
    """exp of the mean nll, with a bootstrap interval over windows; neighbouring tokens are not independent."""
    return _bootstrap(np.array(window_means(found, label)), "PPL", math.exp, seed)


def increase(found: Losses, label: str, base: str = "dense", seed: int = 0) -> Interval:
    """Perplexity of `label` over that of `base` minus 1, windows paired."""
    difference = np.array(window_means(found, label)) - np.array(window_means(found, base))
    return _bootstrap(difference, "of the base's PPL", math.expm1, seed)


def mean_interval(values: NDArray[np.float64], seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean nats over windows."""
    return _bootstrap(values, "nats", float, seed)


def _bootstrap(values: NDArray[np.float64], unit: str, transform: Callable[[float], float], seed: int) -> Interval:
    """Percentile bootstrap of the mean over windows, mapped by a monotone transform."""
    draws = np.random.default_rng(seed).integers(len(values), size=(BOOTSTRAP_DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    point = float(values.mean())
    method = f"bootstrap 95% over windows, {BOOTSTRAP_DRAWS} draws"
    return Interval(transform(point), transform(float(low)), transform(float(high)), len(values), method, unit)
