"""Passkey, multi-key and two-turn retrieval (crossover, section 5.1 and Appendix G), built and graded in token space.

A prompt is natural text with sentences inserted between its own sentences, then an unfinished sentence that asks for a
code ("... The pass key is"): a model that holds the code completes it. Needles are inserted as token ids, so their
positions are known and are checked; codes are compared as token ids, so a code that is part of a longer number is no
hit.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from artifact.engine import prompts
from artifact.errors import UserError
from artifact.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Outcome = Literal["right", "distractor", "wrong", "truncated"]
Test = Literal["passkey", "multikey"]

CODE_DIGITS = 5
ARCHIVES = ("north", "south", "east", "west")
PASSKEY = (" The pass key is{code}. Remember it.", "\n\nWhat was the pass key? The pass key is")
MULTIKEY = (
    " The access code of the {name} archive is{code}.",
    "\n\nWhat was the access code of the {name} archive? The access code of the {name} archive is",
)
SECOND_TURN = ".\n\nWhat was the access code of the {name} archive? The access code of the {name} archive is"


@dataclass(frozen=True)
class Needle:
    """A code and where it lies: code token ids at tokens[start : start + len(code)]."""

    name: str
    code: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.code)


@dataclass(frozen=True)
class Prompt:
    """tokens (n,) int64 ending in the question; asked: index of the needle that it asks for; shared: length of the
    prefix that it has in common with the prompts of the same `haystack`.
    """

    test: Test
    tokens: torch.Tensor
    needles: tuple[Needle, ...]
    asked: int
    haystack: str
    shared: int

    @property
    def needle(self) -> Needle:
        return self.needles[self.asked]

    @property
    def depth(self) -> float:
        """Where the asked needle lies, as a share of the prompt."""
        return self.needle.start / len(self.tokens)

    @property
    def id(self) -> str:
        """Hash of the tokens and of what is asked; the same prompt has the same id in every arm."""
        raw = self.tokens.numpy().astype("<i8").tobytes() + json.dumps(self.needle.code).encode()
        return hashlib.sha256(raw).hexdigest()[:16]


def require_fours(placements: int) -> None:
    """Raise UserError unless every code of a haystack can be asked for as often as the others."""
    if placements % len(ARCHIVES):
        raise UserError(f"{placements} multi-key placements were asked for; give a multiple of {len(ARCHIVES)}")


class Writer:
    """Makes prompts of exact length from one text. The same text, seed and arguments give the same prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: Text, longest: int, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.bos = prompts.beginning(tokenizer)
        self.seed = seed
        ids = prompts.encode_at_least(tokenizer, source.text, longest + len(self.bos), source.name)
        self.haystack = ids[len(self.bos) :].tolist()
        self._ends = [i + 1 for i, token in enumerate(self.haystack) if self._ends_sentence(token)]

    def passkey(self, tokens: int, placements: int) -> list[Prompt]:
        """Return `placements` prompts of `tokens` tokens with one code each, at evenly spread depths."""
        depths = [(i + 0.5) / placements for i in range(placements)]
        codes = self._codes("passkey", tokens, placements)
        return [self._prompt("passkey", tokens, [depths[i]], [("", codes[i])], 0) for i in range(placements)]

    def multikey(self, tokens: int, placements: int) -> list[Prompt]:
        """Return `placements` prompts that hide four similar codes each and ask for one; four in a row share a
        haystack, so that every one of its codes is asked for.
        """
        require_fours(placements)
        count = len(ARCHIVES)
        found = []
        for group in range(placements // count):
            # Groups are shifted against each other, so that all placements differ in depth.
            depths = [(i + (group + 0.5) * count / placements) / count for i in range(count)]
            codes = self._codes(f"multikey{group}", tokens, count)
            names = list(ARCHIVES)
            random.Random(f"{self.seed}|{tokens}|{group}").shuffle(names)
            pairs = list(zip(names, codes, strict=True))
            found += [self._prompt("multikey", tokens, depths, pairs, asked) for asked in range(count)]
        return found

    def second_turn(self, prompt: Prompt) -> tuple[torch.Tensor, Prompt]:
        """Return the turn that follows the right answer of a multi-key prompt, and the prompt that it completes.

        The turn (m,) holds the first answer and a question for another archive; the completed prompt is graded on
        that one.
        """
        other = (prompt.asked + 1) % len(prompt.needles)
        question = SECOND_TURN.format(name=prompt.needles[other].name)
        turn = torch.tensor([*prompt.needle.code, *self.ids(question)], dtype=torch.int64)
        tokens = torch.cat((prompt.tokens, turn))
        return turn, Prompt(prompt.test, tokens, prompt.needles, other, prompt.haystack, len(prompt.tokens))

    def _prompt(
        self, test: Test, tokens: int, depths: Sequence[float], pairs: Sequence[tuple[str, int]], asked: int
    ) -> Prompt:
        sentence, question = PASSKEY if test == "passkey" else MULTIKEY
        pieces, codes = [], []
        for name, code in pairs:
            before, after = sentence.format(name=name, code="\0").split("\0")
            own = self.ids(f" {code:0{CODE_DIGITS}d}")
            pieces.append((self.ids(before), own, self.ids(after)))
            codes.append(tuple(own))
        tail = self.ids(question.format(name=pairs[asked][0]))
        # Questions for different codes differ in length; the text before them must not.
        longest_tail = max(len(self.ids(question.format(name=name))) for name, _ in pairs)
        room = tokens - len(self.bos) - longest_tail - sum(len(part) for piece in pieces for part in piece)
        if room < 64:
            least = tokens - room + 64
            raise UserError(f"a {test} prompt of {tokens} tokens has no room for text; give at least {least}")
        body, needles = list(self.bos), []
        at = 0
        for (name, _), depth, (before_ids, own, after_ids) in zip(pairs, depths, pieces, strict=True):
            cut = self.sentence_end(round(depth * room), at, room)
            body += self.haystack[at:cut] + before_ids
            needles.append(Needle(name, tuple(own), len(body)))
            body += own + after_ids
            at = cut
        body += self.haystack[at:room]
        prompt = Prompt(
            test,
            torch.tensor(body + tail, dtype=torch.int64),
            tuple(needles),
            asked,
            hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16],
            len(body),
        )
        check(prompt, self.bos)
        return prompt

    def sentence_end(self, wanted: int, low: int, high: int) -> int:
        """End of the haystack's sentence nearest to `wanted`, between low and high; `wanted` itself if none is near."""
        inside = [end for end in self._ends if low <= end <= high and abs(end - wanted) < 64]
        return min(inside, key=lambda end: abs(end - wanted)) if inside else max(low, min(wanted, high))

    def _ends_sentence(self, token: int) -> bool:
        text = str(self.tokenizer.decode([token]))
        return text.endswith(".") or "\n" in text

    def _codes(self, name: str, tokens: int, count: int) -> list[int]:
        """Distinct codes without leading zeros, all of one length: only the digits tell them apart."""
        draw = random.Random(f"{self.seed}|{name}|{tokens}")
        return draw.sample(range(10 ** (CODE_DIGITS - 1), 10**CODE_DIGITS), count)

    def ids(self, text: str) -> list[int]:
        """Token ids of a piece of text, without any that mark its beginning."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False).input_ids]


def check(prompt: Prompt, bos: Sequence[int]) -> None:
    """Raise ValueError unless every needle lies where it says, once, and the prompt has exactly the BOS it should."""
    ids = prompt.tokens.tolist()
    for needle in prompt.needles:
        if tuple(ids[needle.start : needle.stop]) != needle.code:
            raise ValueError(f"needle {needle.name or 'pass key'} is not at token {needle.start}")
        width = len(needle.code)
        copies = sum(tuple(ids[i : i + width]) == needle.code for i in range(len(ids) - width + 1))
        if copies != 1:
            raise ValueError(f"code of {needle.name or 'pass key'} occurs {copies} times in its prompt")
    if len({needle.code for needle in prompt.needles}) != len(prompt.needles):
        raise ValueError("two needles carry the same code")
    if ids[: len(bos)] != list(bos) or (bos and ids.count(bos[0]) != 1):
        raise ValueError(f"the prompt must begin with the token ids {list(bos)} and hold no other BOS")


def answer_tokens(prompt: Prompt) -> int:
    """Tokens to generate: the longest code and one more, which shows whether the number goes on."""
    return max(len(needle.code) for needle in prompt.needles) + 1


def grade(prompt: Prompt, generated: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Outcome:
    """Grade generated token ids: the code asked for, the code of another needle, anything else, or too few tokens.

    4821 is no hit in 48213: after the code the next token must not begin with a digit.
    """
    if len(generated) < answer_tokens(prompt):
        return "truncated"
    for index, needle in enumerate(prompt.needles):
        width = len(needle.code)
        if tuple(generated[:width]) == needle.code and not _continues(generated[width], tokenizer):
            return "right" if index == prompt.asked else "distractor"
    return "wrong"


def _continues(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    return str(tokenizer.decode([token]))[:1].isdigit()
