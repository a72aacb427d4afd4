"""Several rewards as the probe asks them: the weighted sum of the reward models, whose gradient is what credit is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from datc_train.reward.several import WeightedRewards, weighted_sum
from datc_train.types import Messages, ScoredRollout


class SumOfModels:
    """`score` of a weighted sum: of its reward models alone, for functions say the same of every token.

    Raises ValueError where no reward model has a weight other than 0.
    """

    def __init__(self, rewards: WeightedRewards) -> None:
        found = [(part.model, part.weight) for part in rewards.parts if part.model is not None]
        if not found:
            raise ValueError("reward: expected a reward model of a weight other than 0: the probe reads its gradient; got none")
        self.models, self.weights = [model for model, _ in found], [weight for _, weight in found]
        self.policy_tokenizer = self.models[0].policy_tokenizer
        self.join = rewards.join

    def score(
        self, prompts: list[Messages], responses: Sequence[Sequence[int]], group_size: int, **options: Any
    ) -> ScoredRollout:
        """As `RewardModel.score`, of sum_i w_i R_i."""
        return weighted_sum(
            [model.score(prompts, responses, group_size, **options) for model in self.models],
            self.weights,
            response_ids=torch.tensor([token for response in responses for token in response], dtype=torch.int64),
            lengths=torch.tensor([len(response) for response in responses], dtype=torch.int64),
            group_size=group_size,
            join=self.join,
        )
