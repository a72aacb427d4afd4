"""DATC's final weights, permuted within each response over its free positions: as uneven, without knowing where.

An ablation of arXiv 2610.32772.
"""

from __future__ import annotations

import torch

from datc_train.credit import datc
from datc_train.credit.dice import dice
from datc_train.credit.types import CreditInputs, TokenAdvantage, weighted


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    weights = datc.token_advantage(inputs).weights
    free, order = ~inputs.frozen.cpu(), torch.arange(len(inputs.frozen))
    for tokens, generator in dice(inputs):
        places = order[tokens][free[tokens]]
        order[places] = places[torch.from_numpy(generator.permutation(len(places)))]
    return weighted(inputs, weights.weight[order.to(weights.weight.device)], weights.temperature)
