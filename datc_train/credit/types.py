"""What a credit method is given and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from datc_kernels import TokenCredit, TokenWeights


@dataclass(frozen=True)
class CreditInputs:
    """B whole responses, N tokens end to end, on one device."""

    credit: TokenCredit  # fields [N]; the reward fields are None unless the method needs the reward's gradient
    advantage: Tensor  # [B] float32
    lengths: Tensor  # [B]
    frozen: Tensor  # [N] bool
    ceiling: float
    utility: str


@dataclass(frozen=True)
class TokenAdvantage:
    value: Tensor  # [N]
    weights: TokenWeights  # what of it is due to weights; mean 1 over a response
