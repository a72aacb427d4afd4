"""OAR-P with a reward model: I_t = |R(x, y) - R(x, y without token t)|, reshaped as in `oar.py` (arXiv 2601.07408).

Costs one row of the reward model a free token, in batches of its token budget: N rows in place of B, a few hundred times the
scoring of a step. For small studies.
"""

from __future__ import annotations

from datc_train.credit.oar import reshaped
from datc_train.credit.types import CreditInputs, TokenAdvantage


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    assert inputs.left_out_score is not None
    score = inputs.score.repeat_interleave(inputs.lengths, output_size=len(inputs.frozen))
    return reshaped(inputs, (score - inputs.left_out_score).abs())
