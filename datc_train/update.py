"""One optimizer step: log-probabilities, credit, weights, loss, gradient; where the weights still are those that sampled, all
in one forward pass each way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datc_kernels import Candidates
from datc_train.candidates import KeptCandidates
from datc_train.clock import Clock
from datc_train.config import Config
from datc_train.credit import METHODS
from datc_train.lesson import Lesson, Shares
from datc_train.losses import LOSSES, count_responses, count_tokens, importance_weights
from datc_train.messages import asked
from datc_train.micro_batches import MicroBatch, micro_batches
from datc_train.optimizer import adamw_step_norm
from datc_train.passes import head
from datc_train.policy import Policy
from datc_train.rollout import check_sampler as check_rollout
from datc_train.share_out import SharesInMaking, share_out
from datc_train.types import Rollout


@dataclass(frozen=True)
class Update:
    """What one step did, token by token where it may be looked at; [N] in the order of the lesson's rollout."""

    shares: Shares  # of the policy that sampled
    entropy: Tensor  # [N] of the policy before this step
    kl: float | None  # mean k3 over tokens
    sampler_difference: float | None  # mean |sampler's log-probability - old policy's| where the sampler knew it
    clip_fraction: float  # of tokens whose ratio the clip held
    correction_mean: float | None  # mean importance weight over tokens; None without a correction
    correction_cut: float | None  # share of tokens that its bound held
    grad_norm: float
    update_norm: float  # of the parameters' change
    candidates: Candidates | None = None  # [M, k] of the M tokens of the responses that are kept


def update(
    policy: Policy,
    optimizer: torch.optim.AdamW,
    lesson: Lesson,
    config: Config,
    *,
    vocab_size: int,
    step: int,
    clock: Clock,
    check_sampler: bool = False,
) -> Update:
    """Accumulate the gradient over micro-batches of whole responses, clip it, step.

    A lesson without shares is one whose weights still are those that sampled: log p_old is log p detached, and credit comes
    from the same forward. A loss or gradient that is not finite raises RuntimeError with the step and the prompts before the
    optimizer moves; so does, with `check_sampler`, a rollout whose log-probabilities are not those of the policy that sampled.
    """
    method, loss, rollout, shares = METHODS[config.method], LOSSES[config.loss], lesson.rollout, lesson.shares
    keep = lesson.keep
    total, total_tokens = count_responses(rollout.lengths, keep), count_tokens(rollout.lengths, keep)
    n, device = len(rollout.response_ids), policy.device
    making = SharesInMaking(lesson, config, device)
    entropy = torch.zeros(n, device=device)
    kl_sum, clipped, tokens, corrected, cut = (torch.zeros((), device=device) for _ in range(5))
    kept = KeptCandidates(policy, rollout, lesson.scored, config, vocab_size)
    optimizer.zero_grad(set_to_none=True)
    for batch in micro_batches(rollout, config.micro_batch_tokens):
        with clock("update"):
            hidden = policy.hidden_states(batch.prompt_ids, batch.response_ids)
        with clock("credit"):
            half = lesson.scored if shares is None and method.needs_credit else None
            credit = head(policy, batch, hidden, rollout, config, vocab_size, half)
        if kept.k:
            with clock("candidates"):
                kept.add(batch, hidden)
        if shares is None:
            with clock("weights"):
                shared = share_out(lesson, config, batch.responses, batch.tokens, credit, hidden)
            making.add(batch.responses, batch.tokens, credit, shared)
            old_logprob, value = credit.logprob.detach(), shared.value
        else:
            old_logprob, value = shares.logprob[batch.tokens], shares.value[batch.tokens]
        if lesson.deviation is not None:  # weights know the scale-free advantage, the loss the unscaled one
            deviation = lesson.deviation[batch.responses]
            value = value * deviation.repeat_interleave(batch.lengths, output_size=len(value))
        importance = None
        if config.sampler_correction is not None:
            sampler_logprob = rollout.sampler_logprob[batch.tokens].to(device)
            mode, bound = config.sampler_correction, config.sampler_correction_bound
            importance, held = importance_weights(old_logprob, sampler_logprob, mode, bound)
            corrected, cut = corrected + importance.sum(), cut + held.sum()
        with clock("update"):
            terms = loss(
                credit.logprob,
                old_logprob,
                value,
                batch.lengths,
                reference_logprob=None if lesson.reference_logprob is None else lesson.reference_logprob[batch.tokens],
                beta=config.beta,
                clip=config.clip,
                clip_high=config.clip_high,
                response_mask=None if keep is None else keep[batch.responses],
                importance=importance,
                total_responses=total,
                total_tokens=total_tokens,
                max_tokens=config.max_new_tokens,
            )
            if not bool(terms.loss.isfinite()):
                raise RuntimeError(
                    f"the loss of step {step} is {terms.loss.item()}; nothing was updated; {_name(rollout, batch)}"
                )
            terms.loss.backward()
        entropy[batch.tokens] = credit.entropy
        kl_sum += 0.0 if terms.kl_sum is None else terms.kl_sum
        clipped += terms.clipped_count
        tokens += terms.token_count
    shares = making.result() if shares is None else shares
    if check_sampler:
        check_rollout(rollout.sampler_logprob, shares.logprob, dtype=policy.weight.dtype)
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
    corrects = config.sampler_correction is not None
    return Update(
        shares=shares,
        entropy=entropy,
        kl=None if lesson.reference_logprob is None else float(kl_sum) / count,
        sampler_difference=_mean_difference(rollout.sampler_logprob, shares.logprob),
        clip_fraction=float(clipped) / count,
        correction_mean=float(corrected) / max(1, n) if corrects else None,
        correction_cut=float(cut) / max(1, n) if corrects else None,
        grad_norm=grad_norm,
        update_norm=float(adamw_step_norm(optimizer)) if moves else 0.0,
        candidates=kept.result(),
    )


def _mean_difference(sampler: Tensor, training: Tensor) -> float | None:
    difference = (sampler.to(training) - training).abs()
    known = difference[~sampler.to(training.device).isnan()]
    return float(known.mean()) if len(known) else None


def _name(rollout: Rollout, batch: MicroBatch) -> str:
    indices = sorted({i // rollout.group_size for i in batch.responses.tolist()})
    first = asked(rollout.prompts[indices[0]].messages)
    return f"prompts {indices} of the step, the first is {first[:80]!r}"
