"""One training step, top-down: prompts -> rollout -> scored rollout -> credit and weights -> loss -> update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from datc_train.advantages import group_advantages
from datc_train.clock import Clock
from datc_train.config import Config
from datc_train.credit import METHODS
from datc_train.policy import Policy
from datc_train.reward import RewardModel
from datc_train.rollout import TransformersSampler
from datc_train.score import RewardFunction, score_rollout
from datc_train.types import Prompt, Rollout, ScoredRollout
from datc_train.update import Update, reference_logprobs, update


@dataclass(frozen=True)
class Step:
    """Everything one step made, and the seconds of its phases."""

    rollout: Rollout
    scored: ScoredRollout
    advantage: Tensor  # [B]
    update: Update
    clock: Clock


class Trainer:
    """The stages of a step, in their order, on models that are loaded already."""

    def __init__(
        self,
        config: Config,
        actor: Policy,
        reward: RewardModel | RewardFunction,
        sampler: TransformersSampler,
        optimizer: torch.optim.AdamW,
    ) -> None:
        self.config = config
        self.actor = actor
        self.reward = reward
        self.sampler = sampler
        self.optimizer = optimizer
        self._table: Tensor | None = None

    def step(self, step: int, prompts: Sequence[Prompt], *, seed: int, check_sampler: bool = False) -> Step:
        """Sample, score, update. The optimizer's learning rate is the caller's matter.

        Raises ValueError and RuntimeError of the stages, with the step in their message.
        """
        clock = Clock(self.actor.device)
        rollout = self.sample(step, prompts, seed, clock)
        return self.learn(step, rollout, clock, check_sampler=check_sampler)

    def sample(self, step: int, prompts: Sequence[Prompt], seed: int, clock: Clock) -> Rollout:
        with _of_step(step), clock("sample"):
            return self.sampler.sample(prompts, seed=seed)

    def learn(self, step: int, rollout: Rollout, clock: Clock, *, check_sampler: bool = False) -> Step:
        config, actor = self.config, self.actor
        with _of_step(step), clock("score"):
            gradient = METHODS[config.method].needs_reward_gradient
            scored = score_rollout(self.reward, rollout, actor.tokenizer, self.sampler.stop_ids, gradient=gradient)
            if scored.reward_embedding is not None:  # a table of another device crosses once
                self._table = scored.reward_embedding.to(actor.device) if self._table is None else self._table
                scored = replace(scored, reward_embedding=self._table)
        advantage = group_advantages(scored.score, config.group_size).to(actor.device)
        reference = None
        if config.beta > 0:
            with clock("reference"):
                reference = reference_logprobs(actor, rollout, config, self.sampler.vocab_size)
        result = update(
            actor,
            self.optimizer,
            rollout,
            scored,
            advantage,
            reference,
            config,
            vocab_size=self.sampler.vocab_size,
            step=step,
            clock=clock,
            check_sampler=check_sampler,
        )
        return Step(rollout, scored, advantage, result, clock)


@contextmanager
def _of_step(step: int) -> Iterator[None]:
    """Says in which step a stage failed that does not know its step."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if type(error) not in (ValueError, RuntimeError):  # running out of memory is another thing
            raise
        raise type(error)(f"{error}; in step {step}") from error
