"""Weights from the policy's entropy at each token: a baseline that costs nothing.

    util = |A| s,  s the standardised entropy          then as DATC: w = n softmax(util / tau) within [1 / ceiling, ceiling]

Where the policy was unsure, the token gets more of the advantage, of either sign. Same allocation as DATC, another signal; works
with any reward function.
"""

from __future__ import annotations

from datc_kernels import allocate_weights
from datc_train.credit.types import CreditInputs, TokenAdvantage, weighted


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    weights = allocate_weights(
        inputs.credit.entropy,
        inputs.advantage.abs(),
        inputs.lengths,
        frozen=inputs.frozen,
        ceiling=inputs.ceiling,
        utility=inputs.utility,
    )
    return weighted(inputs, weights.weight, weights.temperature)
