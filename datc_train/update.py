"""One optimizer step on one rollout: log-probabilities, credit, weights, loss, gradient, in one forward pass each way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datc_kernels import Candidates, linear_credit
from datc_train.candidates import KeptCandidates
from datc_train.clock import Clock
from datc_train.config import Config
from datc_train.credit import METHODS, CreditInputs
from datc_train.losses import LOSSES, count_responses
from datc_train.micro_batches import MicroBatch, micro_batches
from datc_train.optimizer import adamw_step_norm
from datc_train.policy import Policy
from datc_train.rollout import check_sampler as check_rollout
from datc_train.types import Rollout, ScoredRollout


@dataclass(frozen=True)
class Update:
    """What one step did, token by token where it may be looked at; [N] in the rollout's order."""

    logprob: Tensor  # [N] of the policy before the step
    entropy: Tensor  # [N]
    credit: Tensor | None  # [N]
    weight: Tensor  # [N]
    temperature: Tensor  # [B]
    kl: float | None  # mean k3 over tokens
    sampler_difference: float | None  # mean |sampler's log-probability - this policy's| where the sampler knew it
    clip_fraction: float
    grad_norm: float
    update_norm: float  # of the parameters' change
    candidates: Candidates | None = None  # [M, k] of the M tokens of the responses that are kept


def reference_logprobs(policy: Policy, rollout: Rollout, config: Config, vocab_size: int) -> Tensor:
    """log p [N] of the policy that training started from; no gradient, no logits."""
    out = torch.empty(len(rollout.response_ids), dtype=torch.float32, device=policy.device)
    with torch.no_grad(), policy.as_it_started():
        for batch in micro_batches(rollout, config.micro_batch_tokens):
            out[batch.tokens] = _head(policy, batch, rollout, config, vocab_size).logprob
    return out


def update(
    policy: Policy,
    optimizer: torch.optim.AdamW,
    rollout: Rollout,
    scored: ScoredRollout,
    advantage: Tensor,  # [B]
    reference: Tensor | None,  # [N]
    config: Config,
    *,
    vocab_size: int,
    step: int,
    clock: Clock,
    check_sampler: bool = False,
) -> Update:
    """Accumulate the gradient over micro-batches of whole responses, clip it, step.

    The weights that sampled are the weights trained, so log p_old is log p detached, and credit comes from the same forward.
    A loss or gradient that is not finite raises RuntimeError with the step and the prompts before the optimizer moves; so
    does, with `check_sampler`, a rollout whose log-probabilities are not those of this policy.
    """
    method, loss = METHODS[config.method], LOSSES[config.loss]
    keep = rollout.finished if config.mask_truncated else None
    total = count_responses(rollout.lengths, keep)
    n, device = len(rollout.response_ids), policy.device
    logprob, entropy, weight = (torch.zeros(n, device=device) for _ in range(3))
    credit_all = torch.zeros(n, device=device) if method.needs_reward_gradient else None
    temperature = torch.ones(len(rollout.lengths), device=device)
    kl_sum, clipped, tokens = (torch.zeros((), device=device) for _ in range(3))
    kept = KeptCandidates(policy, rollout, scored, config, vocab_size)
    optimizer.zero_grad(set_to_none=True)
    for batch in micro_batches(rollout, config.micro_batch_tokens):
        with clock("update"):
            hidden = policy.hidden_states(batch.prompt_ids, batch.response_ids)
        with clock("credit"):
            half = scored if method.needs_reward_gradient else None
            credit = _head(policy, batch, rollout, config, vocab_size, hidden=hidden, scored=half)
        if kept.k:
            with clock("candidates"):
                kept.add(batch, hidden)
        with clock("weights"):
            shared = method.token_advantage(
                CreditInputs(
                    credit,
                    advantage[batch.responses],
                    batch.lengths,
                    scored.frozen.to(device)[batch.tokens],
                    config.ceiling,
                    config.utility,
                )
            )
        with clock("update"):
            terms = loss(
                credit.logprob,
                credit.logprob.detach(),
                shared.value,
                batch.lengths,
                reference_logprob=None if reference is None else reference[batch.tokens],
                beta=config.beta,
                clip=config.clip,
                response_mask=None if keep is None else keep[batch.responses],
                total_responses=total,
            )
            if not bool(terms.loss.isfinite()):
                raise RuntimeError(
                    f"the loss of step {step} is {terms.loss.item()}; nothing was updated; {_name(rollout, batch)}"
                )
            terms.loss.backward()
        logprob[batch.tokens], entropy[batch.tokens] = credit.logprob.detach(), credit.entropy
        weight[batch.tokens], temperature[batch.responses] = shared.weights.weight, shared.weights.temperature
        if credit_all is not None and credit.credit is not None:
            credit_all[batch.tokens] = credit.credit
        kl_sum += 0.0 if terms.kl_sum is None else terms.kl_sum
        clipped += terms.clipped_count
        tokens += terms.token_count
    if check_sampler:
        check_rollout(rollout.sampler_logprob, logprob, dtype=policy.weight.dtype)
    with clock("update"):
        grad_norm = float(torch.nn.utils.clip_grad_norm_(policy.trainable, config.max_grad_norm))
        if not grad_norm < float("inf"):
            optimizer.zero_grad(set_to_none=True)
            everything = micro_batches(rollout, budget=2**62)[0]
            raise RuntimeError(
                f"the gradient's norm of step {step} is {grad_norm}; nothing was updated; {_name(rollout, everything)}"
            )
        moves = bool(total > 0)  # with nothing left in the loss, momentum and weight decay must not move the weights either
        if moves:
            optimizer.step()
    count = max(1.0, float(tokens))
    return Update(
        logprob=logprob,
        entropy=entropy,
        credit=credit_all,
        weight=weight,
        temperature=temperature,
        kl=None if reference is None else float(kl_sum) / count,
        sampler_difference=_mean_difference(rollout.sampler_logprob, logprob),
        clip_fraction=float(clipped) / count,
        grad_norm=grad_norm,
        update_norm=float(adamw_step_norm(optimizer)) if moves else 0.0,
        candidates=kept.result(),
    )


def _head(policy, batch, rollout, config, vocab_size, *, hidden=None, scored=None):  # type: ignore[no-untyped-def]
    """`linear_credit` of a micro-batch; with `scored`, the reward half of the same call."""
    if hidden is None:
        hidden = policy.hidden_states(batch.prompt_ids, batch.response_ids)
    has_gradient = scored is not None and scored.reward_grad is not None
    return linear_credit(
        hidden,
        policy.weight,
        rollout.response_ids[batch.tokens],
        scored.reward_grad[batch.tokens.to(scored.reward_grad.device)].to(policy.device) if has_gradient else None,
        scored.reward_embedding if has_gradient else None,
        bias=policy.bias,
        temperature=config.temperature,
        softcap=policy.softcap,
        logit_scale=policy.logit_scale,
        vocab_size=vocab_size,
        backend=config.backend,
    )


def _mean_difference(sampler: Tensor, training: Tensor) -> float | None:
    difference = (sampler.to(training) - training).abs()
    known = difference[~sampler.to(training.device).isnan()]
    return float(known.mean()) if len(known) else None


def _name(rollout: Rollout, batch: MicroBatch) -> str:
    indices = sorted({i // rollout.group_size for i in batch.responses.tolist()})
    first = rollout.prompts[indices[0]].messages[-1]["content"]
    return f"prompts {indices} of the step, the first is {first[:80]!r}"
