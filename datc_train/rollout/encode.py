"""What every sampler has to know of a policy's tokenizer: prompt rows, stop ids, and which ids exist at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from datc_train.config import RESERVED_TEMPLATE_KWARGS
from datc_train.messages import asked, started_answer
from datc_train.types import Prompt


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_prompt_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The prompts' rows: the chat template up to where the assistant begins to speak, or, where the last message is the
    assistant's, up to the end of that (`continue_final_message` of transformers), tokenised once.

    The template writes the BOS where there is one; the tokenizer adds no special token of its own.
    `chat_template_kwargs` (`enable_thinking=False`, say) go to the template as they are. Returns P rows of ids, not
    padded and never truncated.

    Raises ValueError for a tokenizer without a chat template, for a prompt that its template refuses, for a started answer
    that it does not write as it is (trimmed blanks, rewritten thoughts), for a row without a token, for a row of more than
    `max_prompt_tokens`, and for chat_template_kwargs that are this function's own.
    """
    taken = RESERVED_TEMPLATE_KWARGS & set(chat_template_kwargs or {})
    if taken:
        raise ValueError(f"chat_template_kwargs: expected keys of the template, got {', '.join(sorted(taken))}")
    if not tokenizer.chat_template:
        raise ValueError("tokenizer: expected one with a chat template, got one whose chat_template is not set")
    rows = []
    for index, prompt in enumerate(prompts):
        try:
            ids = _row(tokenizer, prompt, f"prompt {index} ({_start(prompt)})", dict(chat_template_kwargs or {}))
        except TemplateError as error:
            raise ValueError(f"prompts: the policy's chat template refuses prompt {index} ({_start(prompt)}): {error}") from error
        if not ids:
            raise ValueError(f"prompts: the chat template makes no token of prompt {index}")
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            raise ValueError(
                f"prompts: expected at most {max_prompt_tokens} tokens a prompt, got {len(ids)} in prompt {index} "
                f"({_start(prompt)}); prompts are never cut"
            )
        rows.append(tuple(ids))
    return tuple(rows)


def _row(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, name: str, kwargs: dict[str, Any]) -> list[int]:
    started = started_answer(prompt.messages)
    if started is None:
        return tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
    going_on = kwargs | {"continue_final_message": True}
    try:
        text = tokenizer.apply_chat_template(prompt.messages, tokenize=False, **going_on)
    except ValueError as error:
        if not str(error).startswith("continue_final_message"):
            raise
        text = ""  # it is not in what the template writes
    if not started or not text.endswith(started):
        came = f"a row that ends with {text[-len(started) :]!r:.80}" if text else "a row without it"
        raise ValueError(
            f"prompts: expected a started answer that the policy's chat template writes as it is, got {started!r:.80} in {name}, "
            f"of which it makes {came}; blanks at its ends, or thoughts in it, are written otherwise"
        )
    return tokenizer.apply_chat_template(prompt.messages, tokenize=True, return_dict=False, **going_on)


def _start(prompt: Prompt) -> str:
    return repr(asked(prompt.messages)[:60])


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response, sorted: the tokenizer's EOS, the generation config's (often several), and the
    special token with which the chat template closes an assistant's turn. Empty when the model has none of them."""
    stops: set[int] = set()
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    for ids in (tokenizer.eos_token_id, configured, _end_of_turn(tokenizer)):
        if ids is not None:
            stops.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(stops))


def support_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of columns of the logits that a token can stand for: the tokenizer's largest id + 1, and no more than
    the model has. Models pad their vocabulary (Qwen3: 151,936 columns, 151,669 ids)."""
    known = max(tokenizer.get_vocab().values()) + 1
    return min(known, model.config.get_text_config().vocab_size)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that follows an assistant's words in the chat template, None where no single one does."""
    if not tokenizer.chat_template:
        return None
    words = "DATC"
    turn = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": words}]
    try:
        text = tokenizer.apply_chat_template(turn, tokenize=False)
    except TemplateError:  # a template that refuses this conversation tells nothing about its end
        return None
    if words not in text:
        return None
    tail = tokenizer(text.rsplit(words, 1)[1].lstrip(), add_special_tokens=False)["input_ids"]
    return tail[0] if tail and tail[0] in tokenizer.added_tokens_decoder else None
