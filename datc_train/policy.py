"""The policy as the update sees it: hidden states that predict response tokens, and the head that would turn them into logits.

Logits themselves never exist in training: `datc_kernels.linear_credit` takes it from here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from datc_train.prefix import any_shared, backbone_hidden, read_shared, rest_rows, why_not_shared


@dataclass(frozen=True)
class Policy:
    """A causal language model taken apart at its head; parameters are those of `model`, nothing is copied."""

    model: Any  # transformers, or PEFT on top
    tokenizer: PreTrainedTokenizerBase
    backbone: nn.Module  # ids -> last hidden state, adapters included
    weight: Tensor  # [V, D] LM head
    bias: Tensor | None  # [V]
    softcap: float | None
    logit_scale: float
    trainable: tuple[nn.Parameter, ...]
    start: tuple[Tensor, ...] | None  # copies of `trainable` as training began; None where the adapter switched off is the start

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def hidden_states(self, prompts: Sequence[Sequence[int]], responses: Sequence[Tensor]) -> Tensor:
        """[N, D]: for every token of every response, responses end to end, the hidden state that predicts it.

        A prompt that comes several times is read once, and its gradient is the sum over its responses, where the model allows
        that exactly (`why_not_shared`; a RuntimeWarning says why not). Checkpointed activations drop the cache that it takes.
        """
        prefixes = [tuple(prompt[:-1]) for prompt in prompts]  # the prompt's last token predicts the response's first
        rests = [[prompt[-1], *response[:-1].tolist()] for prompt, response in zip(prompts, responses, strict=True)]
        if any_shared(prefixes) and self._shares_prompts(prompts[0]):
            past = read_shared(self.backbone, prefixes, self.device)
            rows, skipped, cache = rest_rows(rests, past, self.device), [0] * len(rests), past.cache
        else:
            whole = [[*prefix, *rest] for prefix, rest in zip(prefixes, rests, strict=True)]
            rows, skipped, cache = rest_rows(whole, None, self.device), list(map(len, prefixes)), None
        hidden = backbone_hidden(self.backbone, None, rows, cache)
        columns = torch.arange(rows.ids.shape[1])
        ends = torch.tensor([first + len(rest) for first, rest in zip(skipped, rests, strict=True)])
        predicts = (columns >= torch.tensor(skipped)[:, None]) & (columns < ends[:, None])
        return hidden.flatten(0, 1)[predicts.flatten().nonzero().squeeze(1).to(self.device)]

    def _shares_prompts(self, ids: Sequence[int]) -> bool:
        """The same in training and evaluation mode, so that an update's first pass has the numbers of the pass before it."""
        if any(getattr(module, "gradient_checkpointing", False) for module in self.backbone.modules()):
            return False
        reason = why_not_shared(self.backbone, ids, self.device)
        if reason is not None:
            words = f"policy: prompts are read once for every response, not once a group: {reason}"
            warnings.warn(words, RuntimeWarning, stacklevel=3)
        return reason is None

    @contextmanager
    def as_it_started(self) -> Iterator[None]:
        """The policy that training started from, for the KL term: the adapter switched off, or the first weights put back.

        Which parameters train is as it was afterwards.
        """
        flags = [p.requires_grad for p in self.trainable]
        if self.start is None:
            with self.model.disable_adapter():
                yield
        else:
            now = [p.data for p in self.trainable]
            try:
                for p, begin in zip(self.trainable, self.start, strict=True):
                    p.data = begin
                yield
            finally:
                for p, value in zip(self.trainable, now, strict=True):
                    p.data = value
        for p, flag in zip(self.trainable, flags, strict=True):
            p.requires_grad_(flag)


def take_policy(model: Any, tokenizer: PreTrainedTokenizerBase, *, starts_at_base: bool, reference: bool) -> Policy:
    """Take `model` apart.

    starts_at_base: its adapter is fresh, so that switching it off gives the policy that training starts from. Otherwise, and
    where `reference` asks for one, a copy of the trainable parameters is kept.

    Raises ValueError for a model without trainable parameters, with an LM head that is not one linear layer (an adapter or a
    quantisation on it would be ignored), or whose logits are made in a way that the kernels do not know.
    """
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    trainable = tuple(p for p in model.parameters() if p.requires_grad)
    if not trainable:
        raise ValueError("policy: expected trainable parameters, got none (an adapter loaded with is_trainable=False?)")
    for name, adapter in getattr(model, "peft_config", {}).items():
        if adapter.is_prompt_learning:
            raise ValueError(f"policy: expected an adapter of weights (LoRA and the like), got {adapter.peft_type} in {name!r}")
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            f"policy: expected an LM head that is a plain linear layer, got {type(head).__module__}.{type(head).__name__}; "
            "adapters on the head and quantised heads are not supported"
        )
    decoder = base.get_decoder()
    if decoder is None or decoder is base:
        raise ValueError(f"policy: expected a causal language model with a decoder of its own, got {type(base).__name__}")
    seen = {id(p) for module in (decoder, head) for p in module.parameters()}
    if not any(id(p) in seen for p in trainable):
        raise ValueError(
            "policy: expected trainable parameters in the decoder or the LM head, got none there (a prompt-learning adapter?)"
        )
    settings = base.config.get_text_config()
    scaling = getattr(settings, "logits_scaling", None)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        backbone=decoder,
        weight=head.weight,
        bias=head.bias,
        softcap=getattr(settings, "final_logit_softcapping", None),
        logit_scale=1.0 / scaling if scaling else getattr(settings, "logit_scale", None) or 1.0,
        trainable=trainable,
        start=None if starts_at_base or not reference else tuple(p.detach().clone() for p in trainable),
    )


def check_dropout(model: nn.Module) -> None:
    """With gradient checkpointing the policy runs in train mode, where dropout would make it another policy than the sampler's.

    Raises ValueError that names the first module with dropout.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(f"gradient_checkpointing: expected a policy without dropout, got {name} with p={module.p}")
    config = getattr(model, "config", None)
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError("gradient_checkpointing: expected a policy without dropout, got attention_dropout in its config")
