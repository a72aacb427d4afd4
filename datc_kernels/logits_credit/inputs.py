"""The checked arguments of one `logits_credit` call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..finalise import Support
from ..logit_transform import LogitTransform, compute_dtype


@dataclass(frozen=True)
class LogitsInputs:
    logits: Tensor  # [N, V], columns from vocab_size on are never read
    token_ids: Tensor  # [N]
    transform: LogitTransform
    support: Support
    reward_grad: Tensor | None = None  # [N, K]
    reward_embedding: Tensor | None = None  # [rows, K]
    reward: Tensor | None = None  # [N, rows], instead of the two above

    def without_reward(self) -> LogitsInputs:
        return replace(self, reward_grad=None, reward_embedding=None, reward=None)

    @property
    def has_reward(self) -> bool:
        return self.reward_grad is not None or self.reward is not None

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.logits, self.reward_grad, self.reward_embedding, self.reward)
