"""The checked arguments of one `linear_credit` call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..finalise import Support
from ..logit_transform import LogitTransform, compute_dtype


@dataclass(frozen=True)
class LinearInputs:
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D], rows from vocab_size on are never read
    token_ids: Tensor  # [N]
    bias: Tensor | None  # [V]
    transform: LogitTransform
    support: Support
    reward_grad: Tensor | None = None  # [N, K]
    reward_embedding: Tensor | None = None  # [rows, K]

    def without_reward(self) -> LinearInputs:
        return replace(self, reward_grad=None, reward_embedding=None)

    @property
    def has_reward(self) -> bool:
        return self.reward_grad is not None

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.hidden, self.weight, self.reward_grad, self.reward_embedding)

    @property
    def ignored(self) -> Tensor:
        return self.token_ids == self.support.ignore_index
