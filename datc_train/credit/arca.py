"""ARCA: tokens where the adapter changes the hidden state (arXiv 2606.00257).

    m_t = |h_t with the adapter - h_t without it|          w = m / mean m over the response's free positions, 1 at frozen ones

Only with an adapter. Before its first update it changes nothing, and all weights are 1. The states without it come from the pass
that the reference log-probabilities take, kept for the rollout: N D numbers. Where training goes on from an adapter that was
trained already, "without it" is that adapter as training started. Works with any reward function.
"""

from __future__ import annotations

from datc_train.credit.free_positions import FreePositions
from datc_train.credit.types import CreditInputs, TokenAdvantage, weighted


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    assert inputs.hidden is not None
    assert inputs.base_hidden is not None
    salience = (inputs.hidden.float() - inputs.base_hidden.float()).norm(dim=1)
    return weighted(inputs, FreePositions(inputs.lengths, inputs.frozen).to_mean_one(salience))
