"""RED: token rewards from the reward model's score after every token (arXiv 2411.08302).

    r_t = R(x, y up to t) - R(x, y up to t - 1)                                            the score head read at every position
    A_t = A + alpha (r_t - mean r) / sigma                                                 alpha = 1

Mean and population standard deviation are over the response's free positions; at frozen ones, and where sigma = 0, A_t = A.
The paper gives no rule for group advantages; a token reward minus a sequence's baseline would collapse, this form keeps
every response's mean A. Signs may change, and a response of A = 0 learns as well.

The rewards telescope: they leave out what the reward model says of the prompt alone and of its template's closing. That offset,
R(x, y) - sum r, is logged as `red_offset`.
"""

from __future__ import annotations

import torch

from datc_train.credit.free_positions import FreePositions
from datc_train.credit.types import CreditInputs, TokenAdvantage, added

ALPHA = 1.0


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    reward = inputs.token_reward
    assert reward is not None
    positions = FreePositions(inputs.lengths, inputs.frozen)
    mean, sigma = (positions.spread(x) for x in (positions.mean(reward), positions.std(reward)))
    spreads = positions.free & (sigma > 1e-6 * positions.spread(positions.mean(reward.abs())))  # more than rounding
    term = torch.where(spreads, ALPHA * (reward - mean) / torch.where(spreads, sigma, 1.0), 0.0)
    offset = inputs.score.double() - positions.segments.reduce(reward.double(), "sum")
    return added(inputs, term, {"red_offset": offset})
