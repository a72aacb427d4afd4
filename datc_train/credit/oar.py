"""From token importances to weights, as outcome-grounded advantage reshaping does it (arXiv 2601.07408).

    s  = log1p(I)           n = min-max(s) in [0, 1]           th = quantile(n, 0.25)
    w  = max(n / (th + 1e-8), 0.1)                below th
         1 + (n - th) / (1 - th + 1e-8)           from th on
    rescaled to mean 1

over the response's free positions; frozen positions keep 1, and so does a response whose importances are all equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datc_train.credit.free_positions import FreePositions
from datc_train.credit.types import CreditInputs, TokenAdvantage, weighted

QUANTILE, FLOOR, EPSILON = 0.25, 0.1, 1e-8


def reshaped(inputs: CreditInputs, importance: Tensor) -> TokenAdvantage:
    """importance [N], not negative."""
    positions = FreePositions(inputs.lengths, inputs.frozen)
    s = importance.double().log1p()
    low, span = positions.min(s), positions.max(s) - positions.min(s)
    differs = positions.spread(span > 0)
    n = torch.where(differs, (s - positions.spread(low)) / torch.where(differs, positions.spread(span), 1.0), 0.0)
    th = positions.spread(positions.quantile(n, QUANTILE))
    weight = torch.where(n < th, (n / (th + EPSILON)).clamp(min=FLOOR), 1 + (n - th) / (1 - th + EPSILON))
    return weighted(inputs, positions.to_mean_one(torch.where(differs, weight, 1.0)))
