"""Passes of the policy over a rollout that leave no logits: the head of a micro-batch, and the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datc_kernels import TokenCredit, linear_credit
from datc_train.config import Config
from datc_train.micro_batches import MicroBatch, micro_batches
from datc_train.policy import Policy
from datc_train.types import Rollout, ScoredRollout


def head(
    policy: Policy,
    batch: MicroBatch,
    hidden: Tensor,
    rollout: Rollout,
    config: Config,
    vocab_size: int,
    scored: ScoredRollout | None = None,
) -> TokenCredit:
    """`linear_credit` of a micro-batch's hidden states [n, D]; with `scored`, the reward half of the same call."""
    gradient = None if scored is None else scored.reward_grad
    return linear_credit(
        hidden,
        policy.weight,
        rollout.response_ids[batch.tokens],
        None if gradient is None else gradient[batch.tokens.to(gradient.device)].to(policy.device),
        None if gradient is None or scored is None else scored.reward_embedding,
        bias=policy.bias,
        temperature=config.temperature,
        softcap=policy.softcap,
        logit_scale=policy.logit_scale,
        vocab_size=vocab_size,
        backend=config.backend,
    )


@dataclass(frozen=True)
class Reference:
    """The policy that training started from."""

    logprob: Tensor  # [N] float32
    hidden: Tensor | None  # [N, D] in the policy's dtype, where asked for


def reference_pass(policy: Policy, rollout: Rollout, config: Config, vocab_size: int, *, keep_hidden: bool = False) -> Reference:
    """One pass over the rollout without gradient."""
    n, device = len(rollout.response_ids), policy.device
    logprob, kept = torch.empty(n, dtype=torch.float32, device=device), None
    with torch.no_grad(), policy.as_it_started():
        for batch in micro_batches(rollout, config.micro_batch_tokens):
            hidden = policy.hidden_states(batch.prompt_ids, batch.response_ids)
            logprob[batch.tokens] = head(policy, batch, hidden, rollout, config, vocab_size).logprob
            if keep_hidden:
                kept = hidden.new_empty(n, hidden.shape[1]) if kept is None else kept
                kept[batch.tokens] = hidden
    return Reference(logprob, kept)
