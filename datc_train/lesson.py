"""What an update learns from: a scored rollout and everything that was computed before its weights moved."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from datc_train.types import Rollout, ScoredRollout


@dataclass(frozen=True)
class Shares:
    """The policy that sampled, token by token, and what each token's advantage became; constants.

    Legend: N tokens, B responses of the lesson's rollout.
    """

    logprob: Tensor  # [N] float32
    entropy: Tensor  # [N]
    credit: Tensor | None  # [N]; None for methods without it
    value: Tensor  # [N] token advantages
    weight: Tensor  # [N]
    temperature: Tensor  # [B]
    notes: dict[str, Tensor] = field(default_factory=dict)  # [B] each, NaN where undefined


@dataclass(frozen=True)
class Lesson:
    """A scored rollout with its advantages."""

    number: int  # the rollout's, from 1
    rollout: Rollout
    scored: ScoredRollout
    advantage: Tensor  # [B] float32, on the policy's device
    deviation: Tensor | None = None  # [B] factor of the token advantages for losses whose advantage is not divided by it
    reference_logprob: Tensor | None = None  # [N] of the policy that training started from
    base_hidden: Tensor | None = None  # [N, D] its hidden states
    reward: Tensor | None = None  # [B] float64, the shaped one that the advantage is made of; None: the raw score
    keep: Tensor | None = None  # [B] bool, the responses that the loss sees; None: all
    shares: Shares | None = None  # of the old policy; None where update and credit share a forward pass

    def part(self, groups: Tensor) -> Lesson:
        """Some groups of it, `groups` [P'] int64 on the CPU, as a lesson of its own; only where the shares are known."""
        rollout, scored, shares = self.rollout, self.scored, self.shares
        assert shares is not None
        size, lengths = rollout.group_size, rollout.lengths.cpu()
        responses = (groups[:, None] * size + torch.arange(size)).flatten()
        start = lengths.cumsum(0) - lengths
        tokens = torch.cat([torch.arange(int(start[i]), int(start[i] + lengths[i])) for i in responses.tolist()])

        def of(values: Tensor, places: Tensor) -> Tensor:
            return values[places.to(values.device)]

        def where_there(values: Tensor | None, places: Tensor) -> Tensor | None:
            return None if values is None else of(values, places)

        return Lesson(
            number=self.number,
            rollout=replace(
                rollout,
                prompts=tuple(rollout.prompts[i] for i in groups.tolist()),
                prompt_ids=tuple(rollout.prompt_ids[i] for i in groups.tolist()),
                response_ids=of(rollout.response_ids, tokens),
                lengths=of(rollout.lengths, responses),
                sampler_logprob=of(rollout.sampler_logprob, tokens),
                finished=of(rollout.finished, responses),
            ),
            scored=replace(
                scored,
                score=of(scored.score, responses),
                unread=where_there(scored.unread, responses),
                reward_grad=where_there(scored.reward_grad, tokens),
                mapped=of(scored.mapped, tokens),
                frozen=of(scored.frozen, tokens),
                token_reward=where_there(scored.token_reward, tokens),
                left_out_score=where_there(scored.left_out_score, tokens),
                parts={name: of(values, responses) for name, values in scored.parts.items()},
            ),
            advantage=of(self.advantage, responses),
            deviation=where_there(self.deviation, responses),
            reference_logprob=where_there(self.reference_logprob, tokens),
            reward=where_there(self.reward, responses),
            keep=where_there(self.keep, responses),
            shares=Shares(
                logprob=of(shares.logprob, tokens),
                entropy=of(shares.entropy, tokens),
                credit=where_there(shares.credit, tokens),
                value=of(shares.value, tokens),
                weight=of(shares.weight, tokens),
                temperature=of(shares.temperature, responses),
                notes={name: of(values, responses) for name, values in shares.notes.items()},
            ),
        )
