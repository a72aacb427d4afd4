"""OAR-G with a reward model: I_t = |<dR/de_t, e_t>|, reshaped as in `oar.py` (arXiv 2601.07408).

The paper's own gradient is that of a divergence between answer distributions, which needs a span that holds the answer; where a
reward model judges whole responses, its score takes that place.
"""

from __future__ import annotations

from datc_train.credit.oar import reshaped
from datc_train.credit.types import CreditInputs, TokenAdvantage


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    assert inputs.reward_grad is not None
    assert inputs.embedding is not None
    return reshaped(inputs, (inputs.reward_grad.float() * inputs.embedding.float()).sum(1).abs())
