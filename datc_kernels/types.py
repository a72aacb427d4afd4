"""What the ops return: small frozen records of tensors.

Legend, used in the whole package: N tokens, V vocabulary, D policy hidden size, K reward-model hidden size, B responses,
T tokens of a response.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenCredit:
    """Log-probability and directional credit of N sampled tokens; every field is [N].

    Fields are float32 (float64 where an input is float64). `logprob` is differentiable, everything else is a constant.
    The last five are None where no reward gradient was given. Rows with `ignore_index` are exact zeros.
    """

    logprob: Tensor  # log p_y
    entropy: Tensor  # -sum p log p
    logsumexp: Tensor  # log sum exp z
    sum_p2: Tensor  # sum p^2
    credit: Tensor | None = None  # d = <p * A, onehot(y) - p>
    advantage: Tensor | None = None  # A_y = u_y - sum p u
    reward_mean: Tensor | None = None  # sum p u
    displacement_norm: Tensor | None = None  # |p * A|
    force_norm: Tensor | None = None  # |onehot(y) - p|

    @property
    def cosine(self) -> Tensor | None:
        """cos = d / (|G| |k|) in [-1, 1], 0 where |G| |k| = 0; [N], or None without a reward gradient."""
        if self.credit is None or self.displacement_norm is None or self.force_norm is None:
            return None
        # Divided one norm at a time: their product underflows for reward gradients below 1e-19.
        aligned = self.credit / self.displacement_norm / self.force_norm
        defined = (self.displacement_norm > 0) & (self.force_norm > 0)
        return torch.where(defined | aligned.isnan() & self.credit.isnan(), aligned, 0.0).clamp(-1.0, 1.0)


@dataclass(frozen=True)
class TokenWeights:
    """Weights of N tokens and the temperature that made them, one a response."""

    weight: Tensor  # shape of `credit`; mean 1 over a response, exactly 1 where frozen or padded
    temperature: Tensor  # [B], at least 1


@dataclass(frozen=True)
class Candidates:
    """Some columns of N rows: what the policy thinks of them, and what the reward model would."""

    token_ids: Tensor  # [N, k] int64
    probability: Tensor  # [N, k] over the whole support
    advantage: Tensor | None  # [N, k] A_v = u_v - sum p u; 0 where the column has no reward row, None without a reward gradient
