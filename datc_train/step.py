"""One rollout and its updates, top-down: prompts -> rollout -> scored rollout -> credit and weights -> loss -> update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from datc_train.advantages import group_advantages, group_deviations
from datc_train.clock import Clock
from datc_train.config import Config
from datc_train.credit import METHODS
from datc_train.credit_point import EMBEDDING
from datc_train.lesson import Lesson
from datc_train.losses import LOSSES
from datc_train.passes import reference_pass
from datc_train.policy import Policy
from datc_train.reward.functions import RewardError
from datc_train.reward.shaping import FLOOR
from datc_train.rollout import Sampler
from datc_train.score import Reward, score_rollout
from datc_train.shaping import in_the_loss, rewards_of, sample_finished
from datc_train.share_out import old_policy_pass
from datc_train.types import Prompt, Rollout
from datc_train.update import Update, update


@dataclass(frozen=True)
class Step:
    """Everything one update learned from and made, and the seconds of its phases; sampling and scoring count in a rollout's
    first update."""

    lesson: Lesson
    update: Update
    clock: Clock


class Trainer:
    """The stages of a step, in their order, on models that are loaded already."""

    def __init__(
        self,
        config: Config,
        actor: Policy,
        reward: Reward,
        sampler: Sampler,
        optimizer: torch.optim.AdamW,
        sigma0: float | None = None,
    ) -> None:
        """sigma0: the scores' spread as training starts, which `reward_shaping` asks for."""
        if config.reward_shaping and sigma0 is None:
            raise ValueError("sigma0: expected the scores' spread at the start for reward_shaping, got None")
        self.config = config
        self.actor = actor
        self.reward = reward
        self.sampler = sampler
        self.optimizer = optimizer
        self.sigma0 = sigma0 if config.reward_shaping else None
        self._table: Tensor | None = None

    def step(self, step: int, prompts: Sequence[Prompt], *, seed: int, check_sampler: bool = False) -> Step:
        """Sample, score, one update on all of it. The optimizer's learning rate is the caller's matter.

        Raises ValueError and RuntimeError of the stages, with the step in their message.
        """
        clock = Clock(self.actor.device)
        rollout = self.sample(step, prompts, seed, clock)
        return self.learn(step, rollout, clock, check_sampler=check_sampler)

    def learn(self, step: int, rollout: Rollout, clock: Clock, *, check_sampler: bool = False) -> Step:
        """Score a rollout and take one update on all of it."""
        lesson = self.prepare(step, step, rollout, clock, updates=1)
        return self.update(step, lesson, clock, check_sampler=check_sampler)

    def sample(self, step: int, prompts: Sequence[Prompt], seed: int, clock: Clock) -> Rollout:
        """From the weights as they are before `step`."""
        with of_step(step), clock("sample"):
            self.sampler.sync(step - 1)
            if self.sigma0 is not None:
                return sample_finished(self.sampler, list(prompts), seed=seed)
            return self.sampler.sample(prompts, seed=seed)

    def prepare(self, step: int, number: int, rollout: Rollout, clock: Clock, *, updates: int) -> Lesson:
        """Score rollout `number`, and with it everything that must be known before the weights move.

        With one update and a method that looks at one response at a time, credit waits for the update's own forward pass.
        """
        config, actor, method = self.config, self.actor, METHODS[self.config.method]
        with of_step(step), clock("score"):
            gradient = method.needs_reward_gradient
            point = config.point if method.needs_credit else EMBEDDING  # others read the gradient where the tokens are
            scored = score_rollout(
                self.reward,
                rollout,
                actor.tokenizer,
                self.sampler.stop_ids,
                gradient=gradient,
                method=method,
                point=point,
            )
            if scored.reward_embedding is not None:  # a table of another device crosses once
                self._table = scored.reward_embedding.to(actor.device) if self._table is None else self._table
                scored = replace(scored, reward_embedding=self._table)
        reward, floor = scored.score, 0.0
        if self.sigma0 is not None:
            reward, floor = rewards_of(rollout, scored, actor.tokenizer, self.sigma0), FLOOR * self.sigma0
        learned_from = in_the_loss(rollout, mask_truncated=config.mask_truncated, shaped=self.sigma0 is not None)
        advantage = group_advantages(reward, config.group_size, floor=floor).to(actor.device)
        lesson = Lesson(number, rollout, scored, advantage, reward=None if self.sigma0 is None else reward, keep=learned_from)
        if not LOSSES[config.loss].divides_by_deviation:
            lesson = replace(lesson, deviation=group_deviations(reward, config.group_size, floor=floor).to(actor.device))
        if config.beta > 0 or method.needs_base_hidden:
            with clock("reference"):
                keep = method.needs_base_hidden
                reference = reference_pass(actor, rollout, config, self.sampler.vocab_size, keep_hidden=keep)
            logprob = reference.logprob if config.beta > 0 else None
            lesson = replace(lesson, reference_logprob=logprob, base_hidden=reference.hidden)
        if updates > 1 or method.needs_rollout:
            with of_step(step):
                shares = old_policy_pass(actor, lesson, config, self.sampler.vocab_size, clock)
            lesson = replace(lesson, shares=shares, base_hidden=None)
        return lesson

    def update(self, step: int, lesson: Lesson, clock: Clock, *, check_sampler: bool = False) -> Step:
        result = update(
            self.actor,
            self.optimizer,
            lesson,
            self.config,
            vocab_size=self.sampler.vocab_size,
            step=step,
            clock=clock,
            check_sampler=check_sampler,
        )
        return Step(lesson, result, clock)


def parts(lesson: Lesson, config: Config) -> Iterator[Lesson]:
    """What each of a rollout's updates learns from: in every epoch all groups once, shuffled, in equal parts.

    The order depends on the run's seed, the rollout and the epoch.
    """
    for epoch in range(config.epochs_per_rollout):
        if config.updates_per_epoch == 1:
            yield lesson
            continue
        dice = np.random.default_rng([config.seed, lesson.number, epoch])
        order = torch.from_numpy(dice.permutation(len(lesson.rollout.prompts)))
        for groups in order.chunk(config.updates_per_epoch):
            yield lesson.part(groups)


@contextmanager
def of_step(step: int) -> Iterator[None]:
    """Says in which step a stage failed that does not know its step."""
    try:
        yield
    except RewardError as error:
        raise error.in_step(step) from error.__cause__
    except (ValueError, RuntimeError) as error:
        if type(error) not in (ValueError, RuntimeError):  # running out of memory is another thing
            raise
        raise type(error)(f"{error}; in step {step}") from error
