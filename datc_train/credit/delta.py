"""DelTA: tokens whose policy gradient tells good responses from bad ones (arXiv 2605.21467). Batch-level.

    v_t     = (1 - p_y) h_t                                                        h_t the hidden state that predicts the token
    mu+, mu-  means of v over tokens of responses with A > 0 and A < 0, weighted by |A|
    m_t     = |v_t - mu(other side)|^2 - |v_t - mu(own side)|^2
    gamma   = population standard deviation of the margins m on that side
    mu      once more, with weights sigmoid(m / gamma) |A|; m and gamma from them
    w_t     = 0.8 + 0.4 sigmoid(m_t / gamma)          0.8 in responses of A = 0

times one factor that makes the mean over all tokens of the rollout 1 (a response's own mean is not). Every token takes part,
frozen ones too. Without one of the sides there is nothing to tell apart: all weights are 1.

Needs the rollout's hidden states at once: N D numbers, and a pass without gradient before the update. Works with any reward
function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datc_train.credit.types import CreditInputs, TokenAdvantage, weighted

LOW, SPAN = 0.8, 0.4


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    assert inputs.hidden is not None
    advantage = inputs.advantage.repeat_interleave(inputs.lengths, output_size=len(inputs.frozen))
    sides = [advantage > 0, advantage < 0]
    if not all(bool(side.any()) for side in sides):
        return weighted(inputs, torch.ones_like(advantage))
    v = -torch.expm1(inputs.credit.logprob.float())[:, None] * inputs.hidden.float()
    size = advantage.abs()
    share = torch.ones_like(advantage)
    for _ in range(2):
        share = _shares(v, sides, size * share)
    weight = torch.where(advantage == 0, LOW, LOW + SPAN * share)
    return weighted(inputs, weight / weight.double().mean().float())


def _shares(v: Tensor, sides: list[Tensor], weight: Tensor) -> Tensor:
    """sigmoid(m / gamma) [N] with the centroids of these weights [N]; 0.5 where a side's margins are all equal, and off both."""
    means = [(weight * side) @ v / (weight * side).sum() for side in sides]
    share = torch.full_like(weight, 0.5)
    for side, own, other in zip(sides, means, means[::-1], strict=True):
        # |v - other|^2 - |v - own|^2 without the squares of v, which cancel
        margin = (2 * (v @ (own - other)) + other.square().sum() - own.square().sum())[side].double()
        gamma = margin.std(correction=0)
        share[side] = torch.where(gamma > 0, torch.sigmoid(margin / gamma.where(gamma > 0, 1.0)), 0.5).float()
    return share
