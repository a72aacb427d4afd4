"""From the config's `reward` to what scores: one reward model or function, or the weighted sum of several."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from datc_train.config import Config
from datc_train.models import REWARDS, load_reward
from datc_train.reward import RewardModel, WeightedRewards, weighted_rewards
from datc_train.reward.functions import name_of
from datc_train.score import Reward

# module:function; a single letter before the colon is a drive of Windows.
_FUNCTION = re.compile(r"(?!\w:)\w+(?:\.\w+)*:\w+(?:\.\w+)*")


def is_function(name: str) -> bool:
    """Whether a name of the config is `module:function`, and no file or folder."""
    return name not in REWARDS and _FUNCTION.fullmatch(name) is not None and not Path(name).exists()


def reward_items(config: Config) -> list[str]:
    return [config.reward] if isinstance(config.reward, str) else list(config.reward)


def load_rewards(
    config: Config,
    device: torch.device,
    policy_tokenizer: PreTrainedTokenizerBase,
    load: Callable[[Config], RewardModel] | None = None,
) -> Reward:
    """What the config names, reading the policy's token ids.

    `load`: of a config with one reward model, in place of `load_reward` on `device`.

    Raises ValueError as `load_reward` and `load_function`.
    """

    def one(name: str) -> Any:
        if is_function(name):
            return load_function(name)
        alone = replace(config, reward=name, reward_weights=None)
        return load_reward(alone, device, policy_tokenizer) if load is None else load(alone)

    items = reward_items(config)
    rewards = [one(name) for name in items]
    if isinstance(config.reward, str) and not _asks_for_sum(config, rewards[0]):
        only: Reward = rewards[0]
        return only
    names = [name.rpartition(":")[2] if is_function(name) else re.split(r"[/\\]", name.rstrip("/\\"))[-1] for name in items]
    return weighted_rewards(rewards, config.reward_weights, names, config.reward_timeout)


def given_rewards(config: Config, reward: Any) -> Reward:
    """What `train` was given, with the config's weights and time.

    Raises ValueError for an empty list, a list in a list, and weights that do not fit.
    """
    if isinstance(reward, WeightedRewards):
        if config.reward_weights is not None:
            raise ValueError("reward_weights: expected null beside WeightedRewards, which have their own")
        return reward if config.reward_timeout is None else replace(reward, timeout=config.reward_timeout)
    several = isinstance(reward, list | tuple)
    rewards = list(reward) if several else [reward]
    nested = [one for one in rewards if isinstance(one, WeightedRewards | list | tuple)]
    if nested:
        raise ValueError(f"reward: expected reward models and functions in the list, got {type(nested[0]).__name__}")
    if not several and not _asks_for_sum(config, reward):
        only: Reward = reward
        return only
    return weighted_rewards(rewards, config.reward_weights, timeout=config.reward_timeout)


def given_names(reward: Any) -> tuple[str, ...] | None:
    """The names of several rewards that `train` was given; None for others."""
    if isinstance(reward, WeightedRewards):
        return tuple(part.name for part in reward.parts)
    return tuple(map(name_of, reward)) if isinstance(reward, list | tuple) else None


def _asks_for_sum(config: Config, reward: Any) -> bool:
    """Whether a single reward has a weight, or a time that it may take."""
    return config.reward_weights is not None or (config.reward_timeout is not None and not isinstance(reward, RewardModel))


def load_function(name: str) -> Any:
    """The `function` of `module:function`, the current folder's modules among them (after all others).

    Raises ValueError where there is none, from whatever its module raised.
    """
    module_name, _, path = name.partition(":")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"reward: expected quickstart, tiny, a folder, a hub name or module:function, got {name!r}, whose module cannot be "
            f"imported: {words}"
        ) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ValueError(f"reward: expected a function in the module {module_name}, got {name!r}, which is not there")
        found = getattr(found, attribute)
    if not callable(found) or isinstance(found, type):
        raise ValueError(f"reward: expected a function, got {name!r}, which is {_kind(found)}")
    return found


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def models_of(reward: Reward) -> Sequence[RewardModel]:
    """The reward models among the rewards."""
    if isinstance(reward, WeightedRewards):
        return reward.models
    return [reward] if isinstance(reward, RewardModel) else []


def has_function(reward: Reward) -> bool:
    return reward.has_function if isinstance(reward, WeightedRewards) else not isinstance(reward, RewardModel)
