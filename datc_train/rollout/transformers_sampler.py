"""Sampling with transformers' `generate`, from exactly softmax(logits / temperature).

Legend: P prompts, G responses a prompt, B = P G responses, N response tokens end to end, T steps, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from datc_train.prefix import any_shared, cache_argument, read_shared, why_not_shared
from datc_train.rollout.encode import encode_prompts, stop_token_ids, support_size
from datc_train.rollout.policy_mode import sampling_mode
from datc_train.types import Prompt, Rollout


class TransformersSampler:
    """Draws G responses to every prompt from the policy itself (a PEFT model is fine, nothing is merged).

    p = softmax(logits / temperature) over the first `vocab_size` columns, and no other knob: whatever the model's
    `generation_config` says (top_k, top_p, penalties, suppressed or forced tokens, minimum lengths) has no effect.

    model, tokenizer      the policy; sampled in evaluation mode with its cache, restored afterwards
    group_size            G, at least 2
    max_new_tokens        a response that has not stopped by then is cut; nothing is appended to it
    stop_ids              ids that end a response; None: `stop_token_ids(model, tokenizer)`
    vocab_size            the support; None: `support_size(model, tokenizer)`. The loss must be given the same
                          (`self.vocab_size`)
    max_batch_size        responses that are sampled together
    max_prompt_tokens     a longer prompt is a ValueError
    chat_template_kwargs  handed to the chat template

    Raises ValueError for arguments that cannot be.
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
        columns = model.config.get_text_config().vocab_size
        self.vocab_size = support_size(model, tokenizer) if vocab_size is None else vocab_size
        if not 1 <= self.vocab_size <= columns:
            raise ValueError(f"vocab_size: expected 1 to {columns}, the model's columns, got {vocab_size}")
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
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(range(len(rows)), key=lambda index: len(rows[index]), default=None)
        if context is not None and longest is not None and len(rows[longest]) + self.max_new_tokens > context:
            raise ValueError(
                f"max_new_tokens: expected at most {context - len(rows[longest])} beside the longest prompt's "
                f"{len(rows[longest])} tokens in the model's context of {context}, got {self.max_new_tokens}; that is prompt "
                f"{longest} ({prompts[longest].messages[-1]['content'][:60]!r})"
            )
        return rows

    def sample(self, prompts: Sequence[Prompt], *, seed: int) -> Rollout:
        """G responses to each of P prompts, group after group, on the model's device.

        What is drawn for a prompt depends on the weights, the seed and the prompt alone, up to the rounding of the
        forward pass: not on the prompts beside it, their order or the batch size. A prompt given twice gets different
        responses. No global random state is read or changed.

        Raises ValueError for no prompts, for a negative seed, and as `encode`; RuntimeError, with the prompt's index and
        start, for logits that are not finite.
        """
        if not prompts:
            raise ValueError("prompts: expected at least one, got none")
        if seed < 0:
            raise ValueError(f"seed: expected a number >= 0, got {seed}")
        prompt_ids = self.encode(prompts)
        uniforms = _uniforms(seed, prompt_ids, self.group_size, self.max_new_tokens)

        # Rows of similar length share a batch: less padding.
        order = sorted(range(len(uniforms)), key=lambda row: len(prompt_ids[row // self.group_size]))
        ids: dict[int, Tensor] = {}
        logprob: dict[int, Tensor] = {}
        names = [f"{index} ({prompt.messages[-1]['content'][:60]!r})" for index, prompt in enumerate(prompts)]
        with sampling_mode(self.model):
            for start in range(0, len(order), self.max_batch_size):
                rows = order[start : start + self.max_batch_size]
                owners = [row // self.group_size for row in rows]
                batch = self._generate(
                    [prompt_ids[owner] for owner in owners], uniforms[rows], [names[owner] for owner in owners]
                )
                for row, row_ids, row_logprob in zip(rows, *batch, strict=True):
                    ids[row], logprob[row] = row_ids, row_logprob

        everything = [ids[row] for row in range(len(order))]
        response_ids = torch.cat(everything)
        stops = torch.tensor(self.stop_ids, dtype=torch.int64, device=response_ids.device)
        return Rollout(
            prompts=tuple(prompts),
            prompt_ids=prompt_ids,
            group_size=self.group_size,
            response_ids=response_ids,
            lengths=torch.tensor([len(row) for row in everything], device=response_ids.device),
            sampler_logprob=torch.cat([logprob[row] for row in range(len(order))]),
            finished=torch.isin(torch.stack([row[-1] for row in everything]), stops),
        )

    def _generate(
        self, rows: Sequence[Sequence[int]], uniforms: Tensor, names: Sequence[str]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One batch: a response's ids and log-probabilities for every row."""
        device = self.model.get_input_embeddings().weight.device
        # The value of a padded position is never looked at: the mask hides it, and lengths come from the stop ids.
        pad = self.stop_ids[0] if self.stop_ids else 0
        width = max(map(len, rows))
        input_ids = torch.full((len(rows), width), pad, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            input_ids[i, width - len(row) :] = torch.tensor(row)
            mask[i, width - len(row) :] = 1

        past = self._read_prompts(rows, device)
        draw = _Draw(uniforms.to(device), self.temperature, self.vocab_size, names)
        sequences = self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            generation_config=self._generation_config(pad),
            logits_processor=[draw],
            **past,
        )
        ids = sequences[:, width:]
        logprob = torch.stack(draw.logprob[: ids.shape[1]], dim=1)
        stops = torch.tensor(self.stop_ids, dtype=torch.int64, device=device)
        stopped = torch.isin(ids, stops)
        lengths = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, ids.shape[1]).tolist()
        return (
            [row[:length].clone() for row, length in zip(ids, lengths, strict=True)],
            [row[:length].clone() for row, length in zip(logprob, lengths, strict=True)],
        )

    def _read_prompts(self, rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Cache]:
        """Keys and values of the prompts before their last tokens, each prompt read once; empty where that would not be exact
        or would save nothing, and `generate` reads every row."""
        prefixes = [tuple(row[:-1]) for row in rows]
        backbone: Any = getattr(self.model, "get_base_model", lambda: self.model)().get_decoder()
        if not any_shared(prefixes) or why_not_shared(backbone, max(rows, key=len), device) is not None:
            return {}
        return {cache_argument(backbone): read_shared(backbone, prefixes, device).cache}

    def _generation_config(self, pad: int) -> GenerationConfig:
        """`_Draw` leaves one column to choose from, so `generate` takes the arg max and changes no score of its own."""
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=0,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            use_cache=True,
            eos_token_id=list(self.stop_ids) or None,
            pad_token_id=pad,
            return_dict_in_generate=False,
        )


class _Draw(LogitsProcessor):
    """Draws every row's next token by inverse transform and leaves only its column open.

    y = the first v with sum_{w <= v} p_w > u,   p = softmax(logits / temperature) in float64 over the support

    Keeps the log-probability of what was drawn, [rows] a step, and never more than one step's [rows, V].
    """

    def __init__(self, uniforms: Tensor, temperature: float, vocab_size: int, names: Sequence[str]) -> None:
        self.uniforms = uniforms  # [rows, T] float64 in [0, 1)
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.names = names  # [rows] what an error calls each row's prompt
        self.logprob: list[Tensor] = []  # T times [rows] float32

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [rows, V] float32, a copy of `generate`'s own that may be written to."""
        probability = torch.softmax(scores[:, : self.vocab_size].double().div_(self.temperature), dim=-1)
        cumulative = probability.cumsum(-1)
        total = cumulative[:, -1:]
        if not bool(total.isfinite().all()):
            bad = (~total[:, 0].isfinite()).nonzero()[:, 0].tolist()
            raise RuntimeError(
                f"the policy's logits are not finite at response token {len(self.logprob)} of prompt "
                f"{', '.join(dict.fromkeys(self.names[row] for row in bad))}"
            )
        u = self.uniforms[:, len(self.logprob), None]
        drawn = torch.searchsorted(cumulative, u * total, right=True)
        self.logprob.append(probability.gather(1, drawn)[:, 0].log().float())
        return scores.fill_(float("-inf")).scatter_(1, drawn, 0.0)


def _uniforms(seed: int, prompt_ids: Sequence[tuple[int, ...]], group_size: int, steps: int) -> Tensor:
    """[B, steps] float64 in [0, 1): a stream of its own for every (seed, prompt, how often it came before)."""
    before: Counter[tuple[int, ...]] = Counter()
    groups = []
    for ids in prompt_ids:
        stream = np.random.Generator(np.random.PCG64((seed, before[ids], len(ids), *ids)))
        groups.append(torch.from_numpy(stream.random((group_size, steps))))
        before[ids] += 1
    return torch.cat(groups)
