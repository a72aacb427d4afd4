"""DATC's allocation of noise: d := standard normal numbers.

An ablation of arXiv 2610.32772; works with any reward function.
"""

from __future__ import annotations

import numpy as np
import torch

from datc_train.credit.datc import allocated
from datc_train.credit.dice import dice
from datc_train.credit.types import CreditInputs, TokenAdvantage


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    noise = torch.zeros(len(inputs.frozen))
    for tokens, generator in dice(inputs):
        noise[tokens] = torch.from_numpy(generator.standard_normal(tokens.stop - tokens.start).astype(np.float32))
    return allocated(inputs, noise.to(inputs.frozen.device))
