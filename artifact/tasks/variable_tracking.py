"""Variable tracking as in RULER: chains of assignments scattered over natural text; name every variable of a value.

    VAR KQ = 48213.  ...  VAR ZT = VAR KQ.  ...  VAR MB = VAR ZT.

The prompt ends in an unfinished sentence, as the retrieval prompts do. Asked for names, the answer is graded by the
share of the chain's variables that it names (RULER's string match). A small model names nothing; it can still be asked
for the value of the chain's last variable, which takes the same hops. Other chains, with other values, are distractors.
CateKV takes its reference set from here, with other names, values and text than any test prompt.
"""

from __future__ import annotations

import hashlib
import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from artifact.errors import UserError
from artifact.measure.retrieval import Writer

QUESTIONS = {
    "names": (
        "\n\nQuestion: Find all variables that are assigned the value {value} in the text above.\n"
        "Answer: The variables that are assigned the value {value} are"
    ),
    "value": "\n\nWhat is the value of VAR {last}? The value of VAR {last} is",
}
NAME_LETTERS = 2
ANSWER_TOKENS_PER_NAME = 8


@dataclass(frozen=True)
class Tracking:
    """tokens (n,) int64 ending in the question; names: the variables that carry `value`, in order of assignment;
    others: those of the distracting chains; ask: "names" or "value".
    """

    tokens: torch.Tensor
    names: tuple[str, ...]
    others: tuple[str, ...]
    value: int
    ask: str

    @property
    def id(self) -> str:
        """Hash of the prompt: the same in every arm."""
        return hashlib.sha256(self.tokens.numpy().astype("<i8").tobytes()).hexdigest()[:16]

    @property
    def answer_tokens(self) -> int:
        """Tokens to generate for a whole answer."""
        return ANSWER_TOKENS_PER_NAME * (len(self.names) if self.ask == "names" else 1)

    def score(self, answer: str) -> float:
        """Share of the names that the answer gives as words of their own; for a value, whether it comes first."""
        words = re.findall(r"[A-Za-z0-9]+", answer)
        if self.ask == "value":
            return float(words[:1] == [str(self.value)])
        return sum(name in words for name in self.names) / len(self.names)


def prompts(
    writer: Writer, tokens: int, count: int, hops: int = 2, chains: int = 2, ask: str = "names", tag: str = "test"
) -> list[Tracking]:
    """Return `count` prompts of `tokens` tokens with `chains` chains of `hops` + 1 variables each.

    tag separates sets: names, values and places of two tags are drawn independently. Raises UserError when the
    statements do not fit.
    """
    if ask not in QUESTIONS:
        raise UserError(f"variable tracking asks for {' or '.join(QUESTIONS)}, not {ask!r}")
    return [_prompt(writer, tokens, hops, chains, ask, f"{writer.seed}|{tag}|{tokens}|{i}") for i in range(count)]


def _prompt(writer: Writer, tokens: int, hops: int, chains: int, ask: str, seed: str) -> Tracking:
    draw = random.Random(seed)
    names = _names(draw, chains * (hops + 1))
    values = draw.sample(range(10000, 100000), chains)
    groups = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]
    statements = [_statements(group, value) for group, value in zip(groups, values, strict=True)]
    tail = writer.ids(QUESTIONS[ask].format(value=values[0], last=groups[0][-1]))
    pieces = [writer.ids(text) for text in _interleaved(draw, statements)]
    room = tokens - len(writer.bos) - len(tail) - sum(map(len, pieces))
    if room < 64:
        raise UserError(
            f"a tracking prompt of {tokens} tokens has no room for text; give at least {tokens - room + 64}"
        )
    body, at = list(writer.bos), 0
    places = sorted(draw.randrange(room) for _ in pieces)
    for place, piece in zip(places, pieces, strict=True):
        cut = writer.sentence_end(place, at, room)
        body += writer.haystack[at:cut] + piece
        at = cut
    body += writer.haystack[at:room]
    others = tuple(name for group in groups[1:] for name in group)
    return Tracking(torch.tensor(body + tail, dtype=torch.int64), tuple(groups[0]), others, values[0], ask)


def _names(draw: random.Random, count: int) -> list[str]:
    """Distinct names, none of which begins another: a name is found as a word of its own."""
    found: list[str] = []
    while len(found) < count:
        name = "".join(draw.choices(string.ascii_uppercase, k=NAME_LETTERS))
        if name not in found:
            found.append(name)
    return found


def _statements(names: Sequence[str], value: int) -> list[str]:
    first = f" VAR {names[0]} = {value}."
    return [first, *(f" VAR {after} = VAR {before}." for before, after in pairwise(names))]


def _interleaved(draw: random.Random, chains: Sequence[Sequence[str]]) -> list[str]:
    """Statements of all chains in random order, each chain's own order kept: an assignment follows what it reads."""
    turns = [i for i, chain in enumerate(chains) for _ in chain]
    draw.shuffle(turns)
    left = [list(chain) for chain in chains]
    return [left[i].pop(0) for i in turns]
