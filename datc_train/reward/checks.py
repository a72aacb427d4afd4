"""What callers may hand to a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datc_train.messages import asked, with_text
from datc_train.types import Messages

_SHOWN = 60


def name_prompt(index: int, prompt: Sequence[dict[str, Any]]) -> str:
    """How an error calls a prompt: its number and the start of what is asked."""
    text = asked(prompt)
    return f"prompt {index} ({text if len(text) <= _SHOWN else text[:_SHOWN] + '…'!r})"


def conversations(prompts: Sequence[Sequence[dict[str, Any]]]) -> list[Messages]:
    """The prompts with their content as text (`messages.with_text`).

    Raises ValueError, beginning with `prompts`, for what is no list of messages and for content that is not text.
    """
    read = []
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or not prompt or not all(_is_message(message) for message in prompt):
            raise ValueError(f"prompts: expected lists of {{'role', 'content'}} messages, got {prompt!r} at {index}")
        try:
            read.append([with_text(message) for message in prompt])
        except ValueError as error:
            raise ValueError(f"prompts: {error} in prompt {index}") from None
    return read


def check_batch(prompts: Any, responses: Any, group_size: int, vocab_size: int) -> None:
    """Raises ValueError unless these are G responses, lists of ids below `vocab_size`, to each of `conversations`."""
    if type(group_size) is not int or group_size < 1:
        raise ValueError(f"group_size: expected an int of at least 1, got {group_size!r}")
    if len(responses) != len(prompts) * group_size:
        raise ValueError(
            f"responses: expected {len(prompts)} prompts x group_size {group_size} = {len(prompts) * group_size} "
            f"responses, got {len(responses)}"
        )
    for index, response in enumerate(responses):
        if not isinstance(response, list | tuple) or not all(type(token) is int for token in response):
            raise ValueError(f"responses: expected lists of int (tensors: `.tolist()`), got {type(response).__name__} at {index}")
        if response and not 0 <= min(response) <= max(response) < vocab_size:
            wrong = next(token for token in response if not 0 <= token < vocab_size)
            raise ValueError(
                f"responses: expected ids of the policy's vocabulary, 0 to {vocab_size - 1}, got {wrong} in response "
                f"{index % group_size} of {name_prompt(index // group_size, prompts[index // group_size])}"
            )


def check_call(
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    text_of: Callable[[Sequence[int]], str],
    vocab_size: int,
) -> list[Messages]:
    """The prompts of a reward-function call as messages; behind a last one of the assistant's the answer is one more turn.

    So TRL (1.16) samples it: the template closes that message and opens another. An empty message of the assistant's stands for
    it.

    Raises ValueError for columns of unequal length, completions of several messages, and where the ids spell none of the
    completions. (One that differs alone proves nothing: trainers take thoughts out of the text.)
    """
    if not len(prompts) == len(completions) == len(completion_ids):
        raise ValueError(
            "prompts: expected as many as completions and completion_ids, got "
            f"{len(prompts)}, {len(completions)} and {len(completion_ids)}"
        )
    messages = conversations([[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts])
    messages = [m if m[-1]["role"] != "assistant" else [*m, {"role": "assistant", "content": ""}] for m in messages]
    check_batch(messages, completion_ids, 1, vocab_size)
    spelled = []
    for index, (completion, ids) in enumerate(zip(completions, completion_ids, strict=True)):
        if not isinstance(completion, str):
            if len(completion) != 1:
                raise ValueError(f"completions: expected one assistant message each, got {len(completion)} at {index}")
            completion = _text(completion[0], index)
        words = _letters(completion)
        if words:
            spelled.append(words in _letters(text_of(ids)))
    if spelled and not any(spelled):
        raise ValueError(
            "completion_ids: expected ids of the reward model's vocabulary, got ids that spell none of the completions; "
            "the policy has another tokenizer"
        )
    return messages


def _text(completion: dict[str, Any], index: int) -> str:
    try:
        return str(with_text(completion)["content"] or "")
    except ValueError as error:
        raise ValueError(f"completions: {error} in completion {index}") from None


def _letters(text: str) -> str:
    """Without what decoders may treat differently: blanks, and stand-ins for invalid bytes."""
    return "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
