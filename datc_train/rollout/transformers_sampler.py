"""Sampling with transformers' `generate`, from exactly softmax(logits / temperature).

Legend: P prompts, G responses a prompt, B = P G responses, N response tokens end to end, T steps, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, LogitsProcessor

from datc_train.messages import asked
from datc_train.prefix import any_shared, cache_argument, read_shared, why_not_shared
from datc_train.rollout.policy_mode import sampling_mode
from datc_train.rollout.sampler import Sampler
from datc_train.types import Prompt, Rollout


class TransformersSampler(Sampler):
    """Draws from the policy itself (a PEFT model is fine, nothing is merged), in evaluation mode with its cache; the model is
    restored afterwards.

    No other knob than `Sampler`'s: whatever the model's `generation_config` says (top_k, top_p, penalties, suppressed or
    forced tokens, minimum lengths) has no effect.
    """

    def sample(self, prompts: Sequence[Prompt], *, seed: int) -> Rollout:
        """G responses to each of P prompts, group after group, on the model's device.

        What is drawn for a prompt depends on the weights, the seed and the prompt alone, up to the rounding of the
        forward pass: not on the prompts beside it, their order or the batch size. A prompt given twice gets different
        responses. No global random state is read or changed.

        Raises ValueError for no prompts, for a negative seed, and as `encode`; RuntimeError, with the prompt's index and
        start, for logits that are not finite.
        """
        prompt_ids = self._rows(prompts, seed)
        uniforms = _uniforms(seed, prompt_ids, self.group_size, self.max_new_tokens)

        # Rows of similar length share a batch: less padding.
        order = sorted(range(len(uniforms)), key=lambda row: len(prompt_ids[row // self.group_size]))
        ids: dict[int, Tensor] = {}
        logprob: dict[int, Tensor] = {}
        names = [f"{index} ({asked(prompt.messages)[:60]!r})" for index, prompt in enumerate(prompts)]
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
