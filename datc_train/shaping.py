"""Reward shaping in a run: the spread of scores that its terms are measured in, and groups that none of their responses finished.

The formulas are those of `reward/shaping.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from datc_train.reward.overflow import at_group_mean
from datc_train.reward.shaping import cached_spread, shaped_rewards, spread, unfinished_groups
from datc_train.rollout import Sampler
from datc_train.score import Reward, score_rollout
from datc_train.types import Prompt, Rollout, ScoredRollout

_SEED = 20_000_011  # apart from the seeds of training steps and evaluations
_AGAIN = 2**31  # what a second try adds to a rollout's seed, which is below it


def starting_spread(
    folder: Path,
    done: int,
    sampler: Sampler,
    reward: Reward,
    prompts: list[Prompt],
    say: Callable[[str], None] = lambda _: None,
) -> float:
    """sigma0 of the policy that training starts from, measured on one group a prompt and kept in the run's folder.

    Raises ValueError for a run that has gone on (`done` steps) and has lost it, and for a spread of 0.
    """
    path = folder / "sigma0.json"
    if done and not path.exists():
        raise ValueError(f"resume: expected {path}, the spread of scores as the run began, which step {done} no longer shows")

    def measure() -> float:
        say(f"reward_shaping: measuring the scores' spread on {len(prompts)} groups")
        sampler.sync(done)
        rollout = sampler.sample(prompts, seed=_SEED)
        scored = score_rollout(reward, rollout, sampler.tokenizer, sampler.stop_ids, gradient=False)
        return spread(scored.score, sampler.group_size)

    value = cached_spread(path, measure)
    if not value > 0:
        raise ValueError(
            f"reward_shaping: expected scores that differ within most of {len(prompts)} groups at the start, got a median spread "
            "of 0, with which every price would be 0; more shaping_prompts, larger groups, or no shaping"
        )
    return value


def sample_finished(sampler: Sampler, prompts: list[Prompt], *, seed: int) -> Rollout:
    """`sampler.sample`, and once more for the prompts none of whose responses ended by itself."""
    rollout = sampler.sample(prompts, seed=seed)
    places = torch.nonzero(unfinished_groups(rollout.finished, rollout.group_size)).flatten().tolist()
    if not places:
        return rollout
    return with_groups(rollout, places, sampler.sample([prompts[i] for i in places], seed=seed + _AGAIN))


def with_groups(rollout: Rollout, places: list[int], other: Rollout) -> Rollout:
    """`rollout` with the groups of `other` at `places`, in their order."""
    groups = len(rollout.prompts)
    source = {place: groups + i for i, place in enumerate(places)}
    order = [source.get(group, group) for group in range(groups)]
    size = rollout.group_size
    responses = [group * size + i for group in order for i in range(size)]
    lengths = torch.cat([rollout.lengths, other.lengths])

    def tokens(mine: Tensor, theirs: Tensor) -> Tensor:
        parts = torch.cat([mine, theirs]).split(lengths.tolist())
        return torch.cat([parts[i] for i in responses])

    return replace(
        rollout,
        response_ids=tokens(rollout.response_ids, other.response_ids),
        lengths=lengths[responses],
        sampler_logprob=tokens(rollout.sampler_logprob, other.sampler_logprob),
        finished=torch.cat([rollout.finished, other.finished])[responses],
    )


def rewards_of(rollout: Rollout, scored: ScoredRollout, tokenizer: PreTrainedTokenizerBase, sigma0: float) -> Tensor:
    """[B] float64: what advantages are made of. Rows that were not read pay nothing: they keep their group's mean."""
    parts = rollout.response_ids.split(rollout.lengths.tolist())
    texts = [tokenizer.decode(part, skip_special_tokens=True) for part in parts]
    reward = shaped_rewards(scored.score, rollout.lengths, texts, rollout.group_size, sigma0)
    return reward if scored.unread is None else at_group_mean(reward, scored.unread, rollout.group_size)


def in_the_loss(rollout: Rollout, *, mask_truncated: bool, shaped: bool) -> Tensor | None:
    """[B] bool, the responses that are learned from; None: all. With shaping, groups without a finished response are not."""
    keep = rollout.finished if mask_truncated else None
    if shaped:
        none = unfinished_groups(rollout.finished, rollout.group_size).repeat_interleave(rollout.group_size)
        keep = ~none if keep is None else keep & ~none
    return keep
