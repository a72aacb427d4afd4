"""DATC: the response's advantage shared out by directional credit, A w with w from `datc_kernels.allocate_weights`.

arXiv 2610.32772.
"""

from __future__ import annotations

from torch import Tensor

from datc_kernels import allocate_weights
from datc_train.credit.types import CreditInputs, TokenAdvantage, weighted


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    assert inputs.credit.credit is not None
    return allocated(inputs, inputs.credit.credit)


def allocated(inputs: CreditInputs, credit: Tensor) -> TokenAdvantage:
    """A w with the weights that DATC would make of any credit [N]."""
    weights = allocate_weights(
        credit,
        inputs.advantage,
        inputs.lengths,
        frozen=inputs.frozen,
        ceiling=inputs.ceiling,
        utility=inputs.utility,
    )
    return weighted(inputs, weights.weight, weights.temperature)
