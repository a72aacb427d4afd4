"""DATC: the response's advantage shared out by directional credit, A w with w from `datc_kernels.allocate_weights`."""

from __future__ import annotations

from datc_kernels import allocate_weights
from datc_train.credit.types import CreditInputs, TokenAdvantage


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    assert inputs.credit.credit is not None
    weights = allocate_weights(
        inputs.credit.credit,
        inputs.advantage,
        inputs.lengths,
        frozen=inputs.frozen,
        ceiling=inputs.ceiling,
        utility=inputs.utility,
    )
    response = inputs.advantage.repeat_interleave(inputs.lengths, output_size=inputs.frozen.shape[0])
    return TokenAdvantage(response * weights.weight, weights)
