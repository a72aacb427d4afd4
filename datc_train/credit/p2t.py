"""P2T: the reward model's gradient along the token's embedding, as a share of the raw reward (CVPR 2026).

    I_t = <dR/de_t, e_t - e_pad>
    R_t = R + 0.6 R softmax(I)_t                       softmax over the response's free positions, 0 at frozen ones
    A_t = A + 0.1 R_t

R is the raw score, so 0.1 R moves a whole response and the mean is not A; what varies within a response is 0.06 R softmax(I)_t,
which sums to 0.06 R however long the response is. With an outcome reward model it can be negligible: its range over |A| is
logged as `p2t_varying_part` (undefined where A = 0).
"""

from __future__ import annotations

import torch

from datc_train.credit.free_positions import FreePositions
from datc_train.credit.types import CreditInputs, TokenAdvantage, added

SHARE, SCALE = 0.6, 0.1


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    assert inputs.reward_grad is not None
    assert inputs.embedding is not None
    assert inputs.pad_embedding is not None
    importance = (inputs.reward_grad.float() * (inputs.embedding.float() - inputs.pad_embedding.float())).sum(1)
    positions = FreePositions(inputs.lengths, inputs.frozen)
    score = positions.spread(inputs.score.double())
    term = SCALE * (score + SHARE * score * positions.softmax(importance))
    varying = torch.where(positions.count > 0, positions.max(term) - positions.min(term), 0.0)
    size = inputs.advantage.double().abs()
    return added(inputs, term, {"p2t_varying_part": torch.where(size > 0, varying / size, torch.nan)})
