"""How a response's advantage becomes one advantage a token. A method is one file here and one line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from datc_train.credit import datc, grpo
from datc_train.credit.types import CreditInputs, TokenAdvantage


@dataclass(frozen=True)
class Method:
    token_advantage: Callable[[CreditInputs], TokenAdvantage]
    needs_reward_gradient: bool


METHODS: dict[str, Method] = {
    "grpo": Method(grpo.token_advantage, needs_reward_gradient=False),
    "datc": Method(datc.token_advantage, needs_reward_gradient=True),
}

__all__ = ["METHODS", "CreditInputs", "Method", "TokenAdvantage"]
