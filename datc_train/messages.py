"""Chat messages: the text of their content, and the answer that a prompt may already have begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a report is made without torch
    from datc_train.types import Messages


def with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message, its content as text: itself where it is text already (or null, beside tool calls).

    Parts {"type": "text", "text": ...} are put one after another with nothing between them, as templates that take parts do
    (those of Qwen, GLM and LFM; Gemma's also trims every part). Templates that take text alone would write a list of parts as
    Python does, or drop it.

    Raises ValueError for other content, and for parts that are not text (images, audio, video), which are named.
    """
    content = message["content"]
    return message if content is None or isinstance(content, str) else message | {"content": _joined(content)}


def _joined(parts: Any) -> str:
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError(f"expected content that is text or a list of parts with text, got {kind_of(parts)}")
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise ValueError(f"expected parts with a type, {{'type': 'text', 'text': ...}}, got {kind_of(part)} as part {index}")
        if kind != "text":
            raise ValueError(f"expected parts of text alone, got {kind!r} as part {index}: it would not be read")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"expected text in part {index}, got {kind_of(part.get('text'))}")
        texts.append(part["text"])
    return "".join(texts)


def started_answer(messages: Messages) -> str | None:
    """The text from which the answer goes on, a last message of the assistant's; None where the answer is a turn of its own."""
    return messages[-1]["content"] if messages[-1]["role"] == "assistant" else None


def answered(messages: Messages, text: str) -> Messages:
    """The conversation with an answer: a turn of its own, or the started answer with `text` behind it."""
    started = started_answer(messages)
    if started is None:
        return [*messages, {"role": "assistant", "content": text}]
    return [*messages[:-1], messages[-1] | {"content": started + text}]


def asked(messages: Sequence[dict[str, Any]]) -> str:
    """The text of the last message that is not the assistant's: what errors and reports call the prompt by."""
    others = [message for message in messages if message["role"] != "assistant"]
    return str((others or messages)[-1].get("content", ""))


def kind_of(value: Any) -> str:
    """A JSON value's kind, in words for an error."""
    if isinstance(value, dict):
        return f"an object with {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "null" if value is None else repr(value)[:60]
