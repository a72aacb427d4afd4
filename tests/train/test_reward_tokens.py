"""Bytes of tokens, frozen ids by rule, and vocabularies compared id by id."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from test_reward_tiny import (
    CHATML,
    LLAMA_SPLIT,
    QWEN_SPECIALS,
    QWEN_SPLIT,
    byte_level,
    chatml_tokenizer,
    finish,
    llama_tokenizer,
    qwen3_tokenizer,
    sentencepiece_tokenizer,
    tiny_classifier,
)
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from datc_train.reward import RewardModel
from datc_train.reward.frozen import frozen_table, is_layout
from datc_train.reward.token_bytes import token_bytes
from datc_train.reward.vocabulary import check_same_vocabulary


@pytest.mark.parametrize("tokenizer", [chatml_tokenizer, llama_tokenizer, qwen3_tokenizer])
def test_bytes_of_byte_level_tokens(tokenizer: Any) -> None:
    """All 256 bytes, words with their blank, special tokens as they are written."""
    tokenizer = tokenizer()
    table = token_bytes(tokenizer)
    assert len(table) == len(tokenizer)
    assert {bytes([byte]) for byte in range(256)} <= set(table)
    text = "Hello there 🙂 ü\t\n\n" + tokenizer.eos_token + "1"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(table[i] or b"" for i in ids) == text.encode()
    for i, piece in enumerate(table):
        decoded = tokenizer.decode([i])
        assert piece is not None
        assert piece.decode(errors="replace") == decoded


def test_bytes_of_sentencepiece_tokens() -> None:
    tokenizer = sentencepiece_tokenizer()
    table = token_bytes(tokenizer)
    assert table[tokenizer.convert_tokens_to_ids("▁Hello")] == b" Hello"
    assert table[tokenizer.convert_tokens_to_ids("<0xF0>")] == b"\xf0"
    assert table[tokenizer.convert_tokens_to_ids("</s>")] == b"</s>"


def test_gaps_and_added_tokens() -> None:
    """An added token's content is literal, never read through the byte alphabet; an id without a token is None."""
    inner = Tokenizer(models.BPE({"a": 0, "Ġb": 1, "z": 5}, []))
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(["Ġx ü"])
    table = token_bytes(PreTrainedTokenizerFast(tokenizer_object=inner))
    added = inner.token_to_id("Ġx ü")
    assert table[:2] == [b"a", b" b"]
    assert table[added] == "Ġx ü".encode()
    assert table[2] is None or added == 2


def test_tokenizers_that_do_not_say_their_bytes() -> None:
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            inner.decoder = decoder
        with pytest.raises(ValueError, match=r"tokenizer: .*byte-level"):
            token_bytes(PreTrainedTokenizerFast(tokenizer_object=inner))


LAYOUT = [b"", b" ", b"\n", b"\r\n\n", b"\t\t ", b".\n", b". \t\r\n\n", b".\n  \n", "\u3000".encode()]
CONTENT = [b".", b". ", b"..\n", b"\n.", b".\n.", b"!\n", b"a", b" .\n", b"\xff", b"\xe3\x80", b"0"]


def test_layout_rule() -> None:
    assert all(is_layout(piece) for piece in LAYOUT)
    assert not any(is_layout(piece) for piece in CONTENT)


def test_layout_rule_is_the_two_expressions() -> None:
    """Every short string of the characters that matter, against the rule as it is written down."""
    rule = re.compile(r"^\s*$|^\.[ \t\r]*\n\s*$")
    for length in range(5):
        for parts in itertools.product(". \t\n\ra", repeat=length):
            text = "".join(parts)
            assert is_layout(text.encode()) is (rule.match(text) is not None)


def test_frozen_table() -> None:
    """Layout, special tokens and gaps; ids beyond the tokenizer too. Content tokens are free."""
    table = frozen_table([b"a", b" ", None, b".\n", b"</s>", b"<x>"], {4}, 8)
    assert table.tolist() == [False, True, True, True, True, False, True, True]
    assert table.dtype == torch.bool


def test_frozen_ids_of_a_tokenizer() -> None:
    """By rule, not by list: what is frozen in a real score is exactly the rule plus what is not mapped."""
    tokenizer = llama_tokenizer()
    reward = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer)
    ids = tokenizer("Hello.\n\n  I am. fine\n", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    scored = reward.score([[{"role": "user", "content": "hi"}]], [ids], 1)
    table = token_bytes(tokenizer)
    rule = [is_layout(table[i] or b"") or i in tokenizer.all_special_ids for i in ids]
    assert scored.frozen.tolist() == [a or not b for a, b in zip(rule, scored.mapped.tolist(), strict=True)]
    assert not scored.frozen.all()


def test_t24_same_vocabulary_whatever_its_size() -> None:
    """T24: extra ids on either side are fine."""
    small = finish(byte_level(QWEN_SPLIT), QWEN_SPECIALS, bos=None, eos="<|im_end|>", template=CHATML, adds_bos=False)
    large = finish(
        byte_level(QWEN_SPLIT), [*QWEN_SPECIALS, "<|extra|>"], bos=None, eos="<|im_end|>", template=CHATML, adds_bos=False
    )
    check_same_vocabulary(small, large)
    check_same_vocabulary(large, small)
    check_same_vocabulary(small, small)
    model = tiny_classifier("llama", len(large))
    reward = RewardModel(model, small, policy_tokenizer=large)
    extra = large.convert_tokens_to_ids("<|extra|>")
    scored = reward.score([[{"role": "user", "content": "hi"}]], [[40, extra, 41]], 1)
    assert scored.mapped.tolist() == [True, False, True]
    assert scored.frozen.tolist() == [False, True, False]


def test_t24_different_vocabularies_are_told_apart() -> None:
    """T24: equal sizes, other ids; the first ids that differ are named."""
    size = len(chatml_tokenizer())
    swapped = finish(
        byte_level(QWEN_SPLIT),
        ["<|im_start|>", "<|endoftext|>", "<|im_end|>"],
        bos=None,
        eos="<|im_end|>",
        template=CHATML,
        adds_bos=False,
    )
    assert len(swapped) == size
    with pytest.raises(ValueError, match=rf"policy_tokenizer: .*got 2 ids that differ: id {size - 3} is '<\|im_start\|>'"):
        check_same_vocabulary(swapped, chatml_tokenizer())
    other = finish(byte_level(LLAMA_SPLIT, 300), QWEN_SPECIALS, bos=None, eos="<|im_end|>", template=CHATML, adds_bos=False)
    with pytest.raises(ValueError, match=r"policy_tokenizer: .*ids that differ"):
        check_same_vocabulary(other, chatml_tokenizer())


def test_t24_shifted_ids_without_a_shared_id() -> None:
    """T24: a token that moved is a difference even where neither id exists on the other side."""
    pair = []
    for start in (0, 10):
        inner = Tokenizer(models.BPE({"a": start, "b": start + 1}, []))
        pair.append(PreTrainedTokenizerFast(tokenizer_object=inner))
    with pytest.raises(ValueError, match=r"ids that differ"):
        check_same_vocabulary(*pair)
    apart = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"c": 20, "d": 21}, [])))
    with pytest.raises(ValueError, match=r"no token in common"):
        check_same_vocabulary(pair[0], apart)
