"""The checked arguments of one `candidate_advantages` call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..finalise import Support
from ..logit_transform import LogitTransform, compute_dtype


@dataclass(frozen=True)
class CandidateInputs:
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D], rows from vocab_size on are never read
    reward_grad: Tensor | None  # [N, K]
    reward_embedding: Tensor | None  # [rows, K]
    bias: Tensor | None  # [V]
    transform: LogitTransform
    support: Support
    candidate_ids: Tensor | None  # [N, k] int64, all of them within the support
    top_k: int  # used where candidate_ids is None

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.hidden, self.weight, self.reward_grad, self.reward_embedding)
