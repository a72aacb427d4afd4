"""Which response tokens the row holds: the same id on the same bytes, checked against another way of finding them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, groupby
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reward_rows import encode, rows_of
from test_reward_tiny import (
    LLAMA_SPECIALS,
    LLAMA_SPLIT,
    byte_level,
    chatml_tokenizer,
    finish,
    llama_tokenizer,
    qwen3_tokenizer,
    sentencepiece_tokenizer,
)
from tokenizers import normalizers, processors

from datc_train.reward.mapping import aligned_pieces, decode
from datc_train.reward.token_bytes import token_bytes


def spell(tokenizer: Any, *pieces: str) -> list[int]:
    """Ids of the pieces, each tokenized alone: a response that the tokenizer would not have split so."""
    return [token for piece in pieces for token in encode(tokenizer, piece)]


def mapped_tokens(tokenizer: Any, response: list[int]) -> list[tuple[bytes, bool]]:
    bytes_of = token_bytes(tokenizer)
    row = rows_of(tokenizer, response)[0]
    return [(bytes_of[token] or b"", bool(p >= 0)) for token, p in zip(response, row.position, strict=True)]


def test_split_digits_cost_their_own_tokens_only() -> None:
    """Llama reads digits in threes: 1|2|3 of the policy is one id in the row, and what follows is mapped again."""
    tokenizer = llama_tokenizer()
    got = mapped_tokens(tokenizer, spell(tokenizer, "Hello", " ", "1", "2", "3", ".", " you"))
    assert [kept for _, kept in got] == [True, True, False, False, False, True, True]


def test_other_split_of_a_word() -> None:
    tokenizer = chatml_tokenizer()
    assert len(encode(tokenizer, " there")) == 1
    got = mapped_tokens(tokenizer, spell(tokenizer, "Hello", " the", "re", " you"))
    assert [piece for piece, kept in got if not kept] == [b" the", b"re"]
    assert len(got) == 4


def test_emoji_in_pieces() -> None:
    """Pieces of one character are told apart by bytes; text offsets are the same for all of them."""
    tokenizer = llama_tokenizer()
    response = encode(tokenizer, "I 👩‍👧 am ☃ fine")
    assert len(response) > 8
    assert all(kept for _, kept in mapped_tokens(tokenizer, response))


@pytest.mark.parametrize("tokenizer", [chatml_tokenizer, llama_tokenizer, qwen3_tokenizer])
def test_alignment_resumes_after_what_does_not_decode(tokenizer: Any) -> None:
    """Half a character becomes U+FFFD in the text, three bytes where there were two: the rest stays in place."""
    tokenizer = tokenizer()
    half = encode(tokenizer, "☃")[:2]
    hello, end = encode(tokenizer, "Hello there"), encode(tokenizer, ", how are you")
    row = rows_of(tokenizer, [*hello, *half, *end, *half])[0]
    kept = [bool(p >= 0) for p in row.position]
    assert kept == [True] * len(hello) + [False] * 2 + [True] * len(end) + [False] * 2


def test_edges_that_the_template_trims() -> None:
    for tokenizer in (llama_tokenizer(), qwen3_tokenizer()):
        response = spell(tokenizer, "\n\n", "Hello", " there")
        assert mapped_tokens(tokenizer, response) == [(b"\n\n", False), (b"Hello", True), (b" there", True)]
    tokenizer = llama_tokenizer()
    assert mapped_tokens(tokenizer, spell(tokenizer, " there", "\n"))[0] == (b" there", False)  # "there" in the row


def test_response_of_blanks() -> None:
    for tokenizer in (llama_tokenizer(), qwen3_tokenizer(), chatml_tokenizer()):
        row = rows_of(tokenizer, spell(tokenizer, "\n", "\n\n", " "))[0]
        assert row.ids


def test_special_tokens_inside_the_response() -> None:
    """What was sampled is what the reward model reads, turns and all; only the end of the response is cleaned."""
    tokenizer = chatml_tokenizer()
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    response = [*encode(tokenizer, "Hello"), end, start, *encode(tokenizer, "user\nfine"), end]
    row = rows_of(tokenizer, response)[0]
    assert row.position.tolist()[-1] == -1
    assert (row.position[:-1] >= 0).all()


def test_spelled_special_token_is_read_as_one() -> None:
    """Ordinary tokens that spell <|im_end|> become one id in the row: unmapped, and mapping goes on behind them."""
    tokenizer = chatml_tokenizer()
    bytes_of = token_bytes(tokenizer)
    by_bytes = {piece: i for i, piece in enumerate(bytes_of) if piece is not None}
    letters = [by_bytes[bytes([byte])] for byte in b"<|im_end|>"]
    hello = encode(tokenizer, "Hello")
    row = rows_of(tokenizer, [*hello, *letters, *hello])[0]
    assert [p >= 0 for p in row.position] == [True] * len(hello) + [False] * 10 + [True] * len(hello)


def test_trimmed_offsets_do_not_shift_spans() -> None:
    """GPT-2's post-processor leaves blanks out of the offsets; spans come from the bytes."""
    inner = byte_level(LLAMA_SPLIT)
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    inner.normalizer = normalizers.NFC()
    tokenizer = finish(
        inner,
        LLAMA_SPECIALS,
        bos=None,
        eos="<|eot_id|>",
        template="{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}",
        adds_bos=False,
    )
    response = encode(tokenizer, "Hello there, how  are\n you")
    # An uncomposed character in the prompt: the row is no longer byte for byte what the template wrote.
    prompt = [{"role": "user", "content": "cafe\u0301 caf"}]
    assert (rows_of(tokenizer, response, prompt=prompt)[0].position >= 0).all()
    accent = spell(tokenizer, "Hello")
    accent += [i for byte in "e\u0301".encode() for i, b in enumerate(token_bytes(tokenizer)) if b == bytes([byte])]
    accent += spell(tokenizer, " you")
    position = rows_of(tokenizer, accent, prompt=prompt)[0].position
    assert [p >= 0 for p in position] == [True, False, False, False, True]


def test_sentencepiece_pieces() -> None:
    """▁ is a blank, <0xXX> a byte, and the blank that the tokenizer puts in front of the row shifts nothing."""
    tokenizer = sentencepiece_tokenizer()
    response = encode(tokenizer, "Hello there 🙂 I am fine")
    assert all(kept for _, kept in mapped_tokens(tokenizer, response))
    got = mapped_tokens(tokenizer, response[:1] + encode(tokenizer, "🙂")[1:3] + response[1:2])
    assert [kept for _, kept in got] == [True, False, False, True]


def test_ids_that_no_token_has() -> None:
    tokenizer = chatml_tokenizer()
    hello = encode(tokenizer, "Hello")
    row = rows_of(tokenizer, [*hello, len(tokenizer) + 3, *hello])[0]
    assert [p >= 0 for p in row.position] == [True] * len(hello) + [False] + [True] * len(hello)


@given(st.binary(max_size=40))
def test_decode_is_replace_and_knows_its_sources(source: bytes) -> None:
    text, places = decode(source)
    assert text == source.decode(errors="replace")
    encoded = text.encode()
    assert len(places) == len(encoded)
    kept = [(place, byte) for place, byte in zip(places.tolist(), encoded, strict=True) if place >= 0]
    assert [place for place, _ in kept] == sorted({place for place, _ in kept})
    assert all(source[place] == byte for place, byte in kept)
    assert len(kept) == len(source.decode(errors="ignore").encode())


@given(st.text(alphabet="ab .\n", max_size=20), st.text(alphabet="ab .\n", max_size=20))
def test_pieces_are_equal_texts_in_order(response: str, region: str) -> None:
    at_response = at_region = 0
    for a, b, length in aligned_pieces(response, region):
        assert response[a : a + length] == region[b : b + length]
        assert a >= at_response
        assert b >= at_region
        at_response, at_region = a + length, b + length


def expected_positions(tokenizer: Any, response: list[int]) -> list[int]:
    """By text alone: head + response + tail, spans from cumulated bytes, invalid pieces from another decoder."""
    bytes_of = token_bytes(tokenizer)
    source = b"".join(bytes_of[token] or b"" for token in response)
    invalid = [0xDC80 <= ord(c) < 0xDD00 for c in source.decode(errors="surrogateescape")]
    valid_text = iter(source.decode(errors="surrogateescape"))
    replaced = source.decode(errors="replace")
    head = "<|im_start|>user\nHow are you today?<|im_end|>\n<|im_start|>assistant\n"
    row = encode(tokenizer, head + replaced + "<|im_end|>\n")
    ends = list(accumulate(len(bytes_of[token] or b"") for token in row))
    spans = {(end - len(bytes_of[token] or b""), end): (i, token) for i, (token, end) in enumerate(zip(row, ends, strict=True))}
    place: list[int | None] = []
    at, shown = len(head.encode()), 0
    for bad, run in groupby(invalid):
        if bad:
            size = len(list(run))
            place += [None] * size
            [next(valid_text) for _ in range(size)]
            while shown < len(replaced) and replaced[shown] == "\ufffd":
                at, shown = at + 3, shown + 1
        else:
            for _ in run:
                width = len(next(valid_text).encode())
                place += range(at, at + width)
                at, shown = at + width, shown + 1
    positions, start = [], 0
    for token in response:
        own = place[start : start + len(bytes_of[token] or b"")]
        start += len(own)
        first, last = (own[0], own[-1]) if own else (None, None)
        index, found = spans.get((first, last + 1), (-1, None)) if None not in own and last is not None else (-1, None)
        positions.append(index if found == token else -1)
    return positions


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 410), max_size=25))
def test_any_ids_are_mapped_where_another_way_finds_them(response: list[int]) -> None:
    """Random ids: half characters, blanks, splits that no tokenizer makes. (Special tokens have their own tests.)"""
    tokenizer = chatml_tokenizer()
    response = [token for token in response if token < len(tokenizer) - 3]
    assert rows_of(tokenizer, response)[0].position.tolist() == expected_positions(tokenizer, response)


def test_long_random_responses() -> None:
    """The same at length: most positions of random ids stay mapped."""
    tokenizer = chatml_tokenizer()
    chance = random.Random(0)
    ascii_ids = [i for i, piece in enumerate(token_bytes(tokenizer)) if piece and piece.isascii() and not piece.isspace()]
    response = [chance.choice(ascii_ids[:-3]) for _ in range(400)]
    position = rows_of(tokenizer, response)[0].position.tolist()
    assert position == expected_positions(tokenizer, response)
    assert sum(p >= 0 for p in position) > 200


@contextmanager
def at_most_lines(limit: int) -> Iterator[None]:
    """A measure of work that no busy machine changes: lines of Python that run inside."""
    ran = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal ran
        ran += event == "line"
        assert ran <= limit, f"more than {limit} lines"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def test_long_rewritten_thoughts_are_matched_in_little_time() -> None:
    """Thousands of words, also of the same word: work in proportion to them, and natural text is followed to its end."""
    words = [f"w{i % 700}" if i % 3 else "the" for i in range(4000)]
    for body, least in ((" ".join(words), 0.95), ("a " * 4000, 0.0)):
        with at_most_lines(200 * 4000):
            pieces = aligned_pieces(f"<think>\n\n\n{body}</think>The answer", f"{body}\n</think>\n\nThe answer")
        assert sum(length for _, _, length in pieces) >= least * len(body)
