"""GRPO: every token of a response has the response's advantage, w = 1."""

from __future__ import annotations

import torch

from datc_kernels import TokenWeights
from datc_train.credit.types import CreditInputs, TokenAdvantage


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    value = inputs.advantage.repeat_interleave(inputs.lengths, output_size=inputs.frozen.shape[0])
    return TokenAdvantage(value, TokenWeights(torch.ones_like(value), torch.ones_like(inputs.advantage)))
