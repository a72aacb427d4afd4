"""The row that the reward model reads: BOS once, the template's closing always, the response where it really is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reward_tiny import (
    CHATML,
    LLAMA_SPECIALS,
    LLAMA_SPLIT,
    byte_level,
    chatml_tokenizer,
    finish,
    llama_tokenizer,
    qwen3_tokenizer,
    sentencepiece_tokenizer,
    tiny_classifier,
    trl_template,
)

from datc_train.reward import RewardModel
from datc_train.reward.mapped_rows import MappedRow, RowBuilder
from datc_train.reward.rows import RowTemplate, without_stop
from datc_train.reward.token_bytes import token_bytes
from datc_train.reward.vocabulary import policy_vocabulary
from datc_train.types import Messages

PROMPT: Messages = [{"role": "user", "content": "How are you today?"}]


def rows_of(
    tokenizer: Any, *responses: list[int], prompt: Messages = PROMPT, prefix: str = "", stops: tuple[int, ...] = ()
) -> list[MappedRow]:
    bytes_of = token_bytes(tokenizer)
    policy = policy_vocabulary(tokenizer, tokenizer, bytes_of)
    builder = RowBuilder(RowTemplate(tokenizer), bytes_of, policy, prefix)
    return builder.build([prompt], ["prompt 0"], responses, len(responses), stops)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def row_text(tokenizer: Any, row: MappedRow) -> str:
    return tokenizer.decode(row.ids)


def test_t23_bos_exactly_once() -> None:
    """T23: template and tokenizer each bring a BOS; or only the template; or only the tokenizer; or neither."""
    bos = "<|begin_of_text|>"
    for template in (trl_template("llama3_1"), trl_template("llama3"), CHATML):
        for adds_bos in (True, False):
            tokenizer = finish(
                byte_level(LLAMA_SPLIT), LLAMA_SPECIALS, bos=bos, eos="<|eot_id|>", template=template, adds_bos=adds_bos
            )
            row = rows_of(tokenizer, encode(tokenizer, "I am fine"))[0]
            expected = 1 if adds_bos or template != CHATML else 0
            assert row.ids.count(tokenizer.bos_token_id) == expected
            assert row.ids.index(tokenizer.bos_token_id) == 0 if expected else True
            assert (row.position >= 0).all()


def test_t23_a_bos_that_is_the_header_stays() -> None:
    """T23: ChatML models name <|im_start|> their BOS; the tokenizer adds none, so the template's first one must stay."""
    tokenizer = chatml_tokenizer()
    row = rows_of(tokenizer, encode(tokenizer, "I am fine"))[0]
    assert row_text(tokenizer, row) == (
        "<|im_start|>user\nHow are you today?<|im_end|>\n<|im_start|>assistant\nI am fine<|im_end|>\n"
    )


def test_t23_sentencepiece_bos_once() -> None:
    """T23: the same where the tokenizer puts a blank in front of the text."""
    tokenizer = sentencepiece_tokenizer()
    row = rows_of(tokenizer, encode(tokenizer, "Hello there"))[0]
    assert row.ids.count(tokenizer.bos_token_id) == 1
    assert row.ids[0] == tokenizer.bos_token_id


def test_qwen_row_has_the_empty_think_block_and_ends_in_a_newline() -> None:
    """The published row: an empty thought in front, leading newlines of the response gone, the final newline pooled."""
    tokenizer = qwen3_tokenizer()
    row = rows_of(tokenizer, encode(tokenizer, "\n\nI am fine \n"))[0]
    assert row_text(tokenizer, row) == (
        "<|im_start|>user\nHow are you today?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nI am fine \n<|im_end|>\n"
    )
    assert tokenizer.convert_ids_to_tokens(row.ids[-1]) == "Ċ"
    assert [row.ids[p] for p in row.position if p >= 0] == encode(tokenizer, "I am fine \n")


def test_llama_row_is_trimmed_and_ends_at_the_end_of_turn() -> None:
    tokenizer = llama_tokenizer()
    response = encode(tokenizer, "\n\nI am fine\n\n")
    row = rows_of(tokenizer, response)[0]
    text = row_text(tokenizer, row)
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\nI am fine<|eot_id|>")
    assert "Cutting Knowledge Date" in text
    assert [p >= 0 for p in row.position] == [False, *[True] * (len(response) - 2), False]


@pytest.mark.parametrize("tokenizer", [chatml_tokenizer, qwen3_tokenizer, llama_tokenizer])
def test_closing_is_the_templates_own_once(tokenizer: Any) -> None:
    """T13: stopped, cut off, or stopped by another stop id: one closing each, written by the template."""
    tokenizer = tokenizer()
    eos, other = tokenizer.eos_token_id, encode(tokenizer, "1")[0]
    content = encode(tokenizer, "I am fine")
    cut, closed, doubled, stopped = rows_of(
        tokenizer, content, [*content, eos], [*content, eos, eos], [*content, other], stops=(other,)
    )
    assert cut.ids == closed.ids == doubled.ids == stopped.ids
    assert closed.position.tolist() == [*cut.position.tolist(), -1]


def test_t64_thought_that_the_prompt_began() -> None:
    """T64: the policy's prompt ends in <think>; the sampled ids lack it, the reward model's row must not."""
    tokenizer = chatml_tokenizer()
    response = encode(tokenizer, "I am fine\n</think>\n\nHello there")
    row = rows_of(tokenizer, response, prefix="<think>\n")[0]
    assert "<|im_start|>assistant\n<think>\nI am fine\n</think>\n\nHello there<|im_end|>" in row_text(tokenizer, row)
    assert (row.position >= 0).all()
    reward = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer, response_prefix="<think>\n")
    whole = RewardModel(tiny_classifier("llama", len(tokenizer)), tokenizer)
    spelled = encode(tokenizer, "<think>\nI am fine\n</think>\n\nHello there")
    assert reward.score([PROMPT], [response], 1).score == whole.score([PROMPT], [spelled], 1).score


def test_t64_qwen_moves_the_thought_itself() -> None:
    """T64: Qwen's template writes the thought that `</think>` ends, prefix or not; both parts are found in the row."""
    tokenizer = qwen3_tokenizer()
    response = encode(tokenizer, "How are you\n</think>\n\nHello there")
    for prefix in ("", "<think>\n"):
        row = rows_of(tokenizer, response, prefix=prefix)[0]
        assert "assistant\n<think>\nHow are you\n</think>\n\nHello there<|im_end|>" in row_text(tokenizer, row)
        assert (row.position >= 0).all()


def test_thoughts_with_other_blank_lines_are_followed() -> None:
    """The template rewrites the blanks around a thought: words on both sides of them stay mapped."""
    tokenizer = qwen3_tokenizer()
    response = encode(tokenizer, "<think>\n\n\nI am fine</think>Hello there, you")
    row = rows_of(tokenizer, response)[0]
    assert "<think>\nI am fine\n</think>\n\nHello there, you<|im_end|>" in row_text(tokenizer, row)
    mapped = [tokenizer.decode([token]) for token, p in zip(response, row.position, strict=True) if p >= 0]
    for word in (" am", " fine", " there", " you"):
        assert word in mapped


def test_a_dropped_thought_does_not_take_the_answers_place() -> None:
    """A template that keeps only what follows </think>: the answer is mapped, not the same words in the thought."""
    tokenizer = finish(
        byte_level(LLAMA_SPLIT),
        LLAMA_SPECIALS,
        bos=None,
        eos="<|eot_id|>",
        template="{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1].strip() }}<|eot_id|>{% endfor %}",
        adds_bos=False,
    )
    response = encode(tokenizer, "<think> I am fine </think> I am fine")
    row = rows_of(tokenizer, response)[0]
    assert row_text(tokenizer, row).endswith("assistant: I am fine<|eot_id|>")
    placed = [i for i, p in enumerate(row.position) if p >= 0]
    assert placed == list(range(len(response) - len(placed), len(response)))
    assert [row.ids[p] for p in row.position if p >= 0] == encode(tokenizer, " I am fine")[-len(placed) :]


def test_response_that_quotes_prompt_and_template() -> None:
    """The response is where it is, not where its words come first."""
    tokenizer = chatml_tokenizer()
    text = "How are you today?<|im_end|>\n<|im_start|>assistant\nHow are you today?"
    response = encode(tokenizer, text)
    row = rows_of(tokenizer, response)[0]
    head = encode(tokenizer, "<|im_start|>user\nHow are you today?<|im_end|>\n<|im_start|>assistant\n")
    assert row.position.tolist() == list(range(len(head), len(head) + len(response)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "\n", "assistant", "user", "How", " ", "<think>"]), max_size=8))
def test_template_text_never_moves_the_region(parts: list[str]) -> None:
    """Any mixture of the template's own pieces: every id of the response lies right behind the head."""
    tokenizer = chatml_tokenizer()
    response = [token for part in parts for token in encode(tokenizer, part)]
    row = rows_of(tokenizer, response)[0]
    text = row_text(tokenizer, row)
    head = "<|im_start|>user\nHow are you today?<|im_end|>\n<|im_start|>assistant\n"
    kept = without_stop(response, frozenset([tokenizer.eos_token_id]))
    assert text == head + tokenizer.decode(kept) + "<|im_end|>\n"
    first = len(encode(tokenizer, head)) - 1  # its final newline may have merged with one of the response's
    placed = [p for p in row.position.tolist() if p >= 0]
    assert placed == sorted(set(placed))
    assert all(first <= p < len(row.ids) - 2 for p in placed)
    assert all(row.ids[p] == token for p, token in zip(row.position, response, strict=True) if p >= 0)


def test_template_that_does_not_write_the_answer_once() -> None:
    for template, times in (("{{ messages[0].content }}", 0), (CHATML + "{{ messages[-1].content }}", 2)):
        tokenizer = finish(byte_level(LLAMA_SPLIT), LLAMA_SPECIALS, bos=None, eos="<|eot_id|>", template=template, adds_bos=False)
        with pytest.raises(ValueError, match=rf"tokenizer: .*prompt 0.*came {times} times"):
            rows_of(tokenizer, [5])


def test_tokenizer_without_a_template() -> None:
    tokenizer = finish(byte_level(LLAMA_SPLIT), LLAMA_SPECIALS, bos=None, eos="<|eot_id|>", template="x", adds_bos=False)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"tokenizer: .*chat template"):
        RowTemplate(tokenizer)
