"""From the policy's pass over some responses to their token advantages: the one place that calls a credit method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from datc_kernels import TokenCredit
from datc_train.clock import Clock
from datc_train.config import Config
from datc_train.credit import METHODS, CreditInputs, TokenAdvantage
from datc_train.lesson import Lesson, Shares
from datc_train.micro_batches import MicroBatch, micro_batches
from datc_train.modes import evaluating
from datc_train.passes import head
from datc_train.policy import Policy


@torch.no_grad()
def share_out(
    lesson: Lesson, config: Config, responses: Tensor, tokens: Tensor, credit: TokenCredit, hidden: Tensor
) -> TokenAdvantage:
    """The method's token advantages of some whole responses.

    Args:
        responses: [b] their places in the rollout. tokens: [n] those of their tokens, response after response.
        credit: fields [n]. hidden: [n, D], what the head read.
    """
    method, scored, device = METHODS[config.method], lesson.scored, hidden.device

    def of(values: Tensor, places: Tensor) -> Tensor:
        return values[places.to(values.device)].to(device)

    def where_there(values: Tensor | None, places: Tensor) -> Tensor | None:
        return None if values is None else of(values, places)

    embedding = pad = gradient = None
    if method.needs_embedding:
        assert scored.reward_embedding is not None
        # An id without a row in the table is never mapped: its gradient is 0, whatever stands here.
        ids = lesson.rollout.response_ids[tokens].clamp(max=len(scored.reward_embedding) - 1)
        gradient, embedding = where_there(scored.reward_grad, tokens), of(scored.reward_embedding, ids)
        pad = None if scored.pad_embedding is None else scored.pad_embedding.to(device)
    return method.token_advantage(
        CreditInputs(
            credit=credit,
            advantage=of(lesson.advantage, responses),
            lengths=lesson.rollout.lengths[responses],
            frozen=of(scored.frozen, tokens),
            ceiling=config.ceiling,
            utility=config.utility,
            responses=responses,
            seed=(config.seed, lesson.number),
            score=of(scored.score, responses),
            reward_grad=gradient,
            embedding=embedding,
            pad_embedding=pad,
            token_reward=where_there(scored.token_reward, tokens),
            left_out_score=where_there(scored.left_out_score, tokens),
            hidden=hidden.detach() if method.needs_hidden else None,
            base_hidden=where_there(lesson.base_hidden, tokens),
        )
    )


def old_policy_pass(policy: Policy, lesson: Lesson, config: Config, vocab_size: int, clock: Clock) -> Shares:
    """The whole rollout in evaluation mode and without gradient, before any of its updates."""
    method, rollout = METHODS[config.method], lesson.rollout
    making = SharesInMaking(lesson, config, policy.device)
    passed: list[tuple[MicroBatch, TokenCredit, Tensor]] = []
    with torch.no_grad(), evaluating(policy.model):
        for batch in micro_batches(rollout, config.micro_batch_tokens):
            with clock("old_policy"):
                hidden = policy.hidden_states(batch.prompt_ids, batch.response_ids)
            with clock("credit"):
                half = lesson.scored if method.needs_credit else None
                credit = head(policy, batch, hidden, rollout, config, vocab_size, half)
            if method.needs_rollout:
                passed.append((batch, credit, hidden))
                continue
            with clock("weights"):
                shared = share_out(lesson, config, batch.responses, batch.tokens, credit, hidden)
            making.add(batch.responses, batch.tokens, credit, shared)
    if passed:
        with clock("weights"):
            responses = torch.cat([batch.responses for batch, _, _ in passed])
            tokens = torch.cat([batch.tokens for batch, _, _ in passed])
            credit = _joined([credit for _, credit, _ in passed])
            shared = share_out(lesson, config, responses, tokens, credit, torch.cat([hidden for _, _, hidden in passed]))
        making.add(responses, tokens, credit, shared)
    return making.result()


class SharesInMaking:
    """Fills `Shares` micro-batch by micro-batch."""

    def __init__(self, lesson: Lesson, config: Config, device: torch.device) -> None:
        n, b = len(lesson.rollout.response_ids), len(lesson.rollout.lengths)
        self._b, self._device = b, device
        self._token = {name: torch.zeros(n, device=device) for name in ("logprob", "entropy", "value", "weight")}
        self._credit = torch.zeros(n, device=device) if METHODS[config.method].needs_credit else None
        self._temperature = torch.ones(b, device=device)
        self._notes: dict[str, Tensor] = {}

    def add(self, responses: Tensor, tokens: Tensor, credit: TokenCredit, shared: TokenAdvantage) -> None:
        found: Mapping[str, Tensor] = {
            "logprob": credit.logprob.detach(),
            "entropy": credit.entropy,
            "value": shared.value,
            "weight": shared.weights.weight,
        }
        for name, values in found.items():
            self._token[name][tokens] = values
        if self._credit is not None and credit.credit is not None:
            self._credit[tokens] = credit.credit
        self._temperature[responses] = shared.weights.temperature
        for name, values in shared.notes.items():
            if name not in self._notes:
                self._notes[name] = torch.full((self._b,), torch.nan, dtype=torch.float64, device=self._device)
            self._notes[name][responses] = values.double()

    def result(self) -> Shares:
        return Shares(**self._token, credit=self._credit, temperature=self._temperature, notes=self._notes)


def _joined(parts: list[TokenCredit]) -> TokenCredit:
    def join(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    return TokenCredit(**{field.name: join(field.name) for field in fields(TokenCredit)})
