"""Text to token ids, with exactly one beginning-of-sequence token where the tokenizer wants one and none elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from artifact.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [BOS] when the tokenizer itself puts one before plain text, otherwise []."""
    bos = tokenizer.bos_token_id
    ids = tokenizer("a").input_ids
    return [int(bos)] if bos is not None and ids and ids[0] == bos else []


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Return (n,) int64 token ids of `text`; a BOS that the text itself spells out is not doubled."""
    start = beginning(tokenizer)
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    while start and ids and ids[0] == start[0]:
        ids = ids[1:]
    return torch.tensor(start + ids, dtype=torch.int64)


def encode_at_least(tokenizer: PreTrainedTokenizerBase, text: str, count: int, name: str) -> torch.Tensor:
    """Return the first `count` tokens of `text`, or raise UserError when it is too short.

    Only a prefix long enough is tokenised: a text of megabytes would cost seconds.
    """
    length = 8 * count
    while True:
        ids = encode(tokenizer, text[:length])
        # The last tokens of a cut prefix can differ from those of the whole text; 16 is more than any merge spans.
        if ids.shape[0] >= count + 16 or length >= len(text):
            break
        length *= 2
    if ids.shape[0] < count:
        raise UserError(f"{name} has {ids.shape[0]} tokens, {count} are needed; give a longer text with --text FILE")
    return ids[:count].contiguous()
