"""What every sampler is: prompts in, a `Rollout` out, from the policy's weights of a version that it was told of.

Legend: P prompts, G responses a prompt.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from datc_train.messages import asked
from datc_train.rollout.encode import encode_prompts, stop_token_ids, support_size
from datc_train.types import Prompt, Rollout


class Sampler(ABC):
    """Draws G responses to every prompt from p = softmax(logits / temperature) over the first `vocab_size` columns.

    model, tokenizer      the policy
    group_size            G, at least 2
    max_new_tokens        a response that has not stopped by then is cut; nothing is appended to it
    stop_ids              ids that end a response; None: `stop_token_ids(model, tokenizer)`
    vocab_size            the support; None: `support_size(model, tokenizer)`. The loss must be given the same
                          (`self.vocab_size`)
    max_batch_size        responses that are sampled together
    max_prompt_tokens     a longer prompt is a ValueError
    chat_template_kwargs  handed to the chat template

    Raises ValueError for arguments that cannot be.

    A run calls `open` once, `sync` before whatever it samples, `close` at its end. A sampler that draws from `model` itself
    needs none of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        group_size: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        max_batch_size: int = 64,
        max_prompt_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if group_size < 2:
            raise ValueError(
                f"group_size: expected at least 2, got {group_size}; a response's advantage is its distance from the "
                "others of its group"
            )
        for name, count in (("max_new_tokens", max_new_tokens), ("max_batch_size", max_batch_size)):
            if count < 1:
                raise ValueError(f"{name}: expected at least 1, got {count}")
        if not 0.0 < temperature < float("inf"):
            raise ValueError(f"temperature: expected a positive number, got {temperature}")
        self.columns: int = model.config.get_text_config().vocab_size
        self.vocab_size = support_size(model, tokenizer) if vocab_size is None else vocab_size
        if not 1 <= self.vocab_size <= self.columns:
            raise ValueError(f"vocab_size: expected 1 to {self.columns}, the model's columns, got {vocab_size}")
        self.stop_ids = stop_token_ids(model, tokenizer) if stop_ids is None else tuple(sorted(set(stop_ids)))
        if stop_ids is None and not self.stop_ids:
            raise ValueError("stop_ids: the tokenizer, the generation config and the chat template name none; give them")
        if any(not 0 <= stop < self.vocab_size for stop in self.stop_ids):
            raise ValueError(f"stop_ids: expected ids below vocab_size {self.vocab_size}, got {self.stop_ids}")

        self.model = model
        self.tokenizer = tokenizer
        self.group_size = group_size
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.max_batch_size = max_batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self.chat_template_kwargs = dict(chat_template_kwargs or {})

    def encode(self, prompts: Sequence[Prompt]) -> tuple[tuple[int, ...], ...]:
        """The prompts' rows of ids, P of them: what `sample` gives the model.

        Raises ValueError as `encode_prompts`, and for a row that `max_new_tokens` would take beyond the model's context.
        """
        rows = encode_prompts(
            self.tokenizer,
            prompts,
            max_prompt_tokens=self.max_prompt_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        embedded = self.model.get_input_embeddings().weight.shape[0]
        for index, row in enumerate(rows):
            if max(row) >= embedded:
                raise ValueError(
                    f"policy: expected ids below {embedded} (its embedding's rows) from its tokenizer, got {max(row)} in prompt "
                    f"{index} ({asked(prompts[index].messages)[:60]!r}); is this the policy's tokenizer?"
                )
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(range(len(rows)), key=lambda index: len(rows[index]), default=None)
        if context is not None and longest is not None and len(rows[longest]) >= context:
            raise ValueError(
                f"prompts: expected fewer than {context} tokens (the policy's context), got {len(rows[longest])} in prompt "
                f"{longest} ({asked(prompts[longest].messages)[:60]!r})"
            )
        if context is not None and longest is not None and len(rows[longest]) + self.max_new_tokens > context:
            raise ValueError(
                f"max_new_tokens: expected at most {context - len(rows[longest])} beside the longest prompt's "
                f"{len(rows[longest])} tokens in the model's context of {context}, got {self.max_new_tokens}; that is prompt "
                f"{longest} ({asked(prompts[longest].messages)[:60]!r})"
            )
        return rows

    def with_group_size(self, group_size: int) -> Self:
        """The same sampler, with what it has opened, for groups of another size."""
        other = copy.copy(self)
        other.group_size = group_size
        return other

    def open(self, folder: Path) -> None:  # noqa: B027 - most samplers keep nothing
        """A run's folder, where the sampler may keep what it needs."""

    def sync(self, version: int) -> None:  # noqa: B027
        """From here on sample from the policy's weights as they are now, those after `version` updates.

        A call with the version that is served already does nothing.
        """

    @abstractmethod
    def sample(self, prompts: Sequence[Prompt], *, seed: int) -> Rollout:
        """G responses to each of P prompts, group after group, on the model's device.

        What is drawn for a prompt depends on the weights, the seed and the prompt alone, up to the rounding of the
        forward pass. A prompt given twice gets different responses.

        Raises ValueError for no prompts, for a negative seed, and as `encode`.
        """

    def close(self) -> None:  # noqa: B027
        """Give back what `open` and `sync` took, and end every process of the sampler's. May be called more than once."""

    def _rows(self, prompts: Sequence[Prompt], seed: int) -> tuple[tuple[int, ...], ...]:
        if not prompts:
            raise ValueError("prompts: expected at least one, got none")
        if seed < 0:
            raise ValueError(f"seed: expected a number >= 0, got {seed}")
        return self.encode(prompts)
