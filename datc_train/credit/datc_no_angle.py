"""DATC without the angle: d := |G| |k|, how strong reward and score are, not whether they point the same way.

An ablation of arXiv 2610.32772. The credit is never negative, so nothing tells help from harm.
"""

from __future__ import annotations

from datc_train.credit.datc import allocated
from datc_train.credit.types import CreditInputs, TokenAdvantage


def token_advantage(inputs: CreditInputs) -> TokenAdvantage:
    displacement, force = inputs.credit.displacement_norm, inputs.credit.force_norm
    assert displacement is not None
    assert force is not None
    return allocated(inputs, displacement * force)
