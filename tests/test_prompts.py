"""Text to tokens: exactly one BOS where the tokenizer wants one, none elsewhere."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from artifact.engine import prompts
from artifact.errors import UserError

BOS, EOS = 256, 257


def tokenizer(adds_bos: bool, adds_eos: bool = False, has_bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token a byte, <s> and </s> on top."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    plain = Tokenizer(BPE({**vocabulary, "<s>": BOS, "</s>": EOS}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    template = ("<s> " if adds_bos else "") + "$A" + (" </s>" if adds_eos else "")
    plain.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    special = {"bos_token": "<s>", "eos_token": "</s>"} if has_bos else {"eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special)


TEXTS = ["one", "<s>one", "<s><s><s>one", "<s>", "", " ", "one\n<s>two", "ünïcode <|im_start|>"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("adds_eos", [False, True])
def test_fault_29_exactly_one_bos_where_the_tokenizer_wants_one(text: str, adds_eos: bool) -> None:
    ids = prompts.encode(tokenizer(adds_bos=True, adds_eos=adds_eos), text).tolist()
    assert ids[0] == BOS and ids[1:2] != [BOS]
    rest = text.removeprefix("<s><s>").removeprefix("<s>")
    assert len(ids) == 1 + len(rest.replace("<s>", "").encode()) + rest.count("<s>")
    assert EOS not in ids, "a prompt goes on"


@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize("text", ["one", "", " a b"])
def test_fault_29_none_where_it_does_not(text: str, has_bos: bool) -> None:
    wants_none = tokenizer(adds_bos=False, has_bos=has_bos)
    assert prompts.beginning(wants_none) == []
    ids = prompts.encode(wants_none, text).tolist()
    assert BOS not in ids and len(ids) == len(text)


def test_ids_are_those_of_the_text_in_order() -> None:
    one = tokenizer(adds_bos=True)
    text = "The crossover moves with precision."
    ids = prompts.encode(one, text)
    assert one.decode(ids[1:]) == text and ids.dtype.is_signed and ids.dim() == 1


def test_a_prefix_long_enough_is_the_prefix_of_the_whole() -> None:
    one, text = tokenizer(adds_bos=True), "word and word, " * 400
    whole = prompts.encode(one, text)
    for count in (1, 17, 1000, 5999):
        assert prompts.encode_at_least(one, text, count, "text").tolist() == whole[:count].tolist()


def test_a_text_too_short_is_named() -> None:
    with pytest.raises(UserError, match="diary has 4 tokens, 5 are needed; give a longer text with --text FILE"):
        prompts.encode_at_least(tokenizer(adds_bos=True), "abc", 5, "diary")
