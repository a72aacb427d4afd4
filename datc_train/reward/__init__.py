"""Scores, and their gradient at every response token, from a frozen reward model. See README.md."""

from datc_train.reward.model import RewardModel

__all__ = ["RewardModel"]
