"""Scores, and their gradient at every response token, from frozen reward models; sums of several rewards. See README.md."""

from datc_train.reward.functions import RewardError
from datc_train.reward.model import RewardModel
from datc_train.reward.several import RewardPart, WeightedRewards, weighted_rewards, weighted_sum

__all__ = ["RewardError", "RewardModel", "RewardPart", "WeightedRewards", "weighted_rewards", "weighted_sum"]
