"""How a response's advantage becomes one advantage a token. A method is one file here and one line in `METHODS`."""

from __future__ import annotations

from datc_train.credit import (
    arca,
    datc,
    datc_no_angle,
    datc_random,
    datc_shuffled,
    delta,
    entropy,
    grpo,
    oar_g,
    oar_p,
    p2t,
    red,
)
from datc_train.credit.types import CreditInputs, Method, TokenAdvantage

ALL = frozenset({"mean", "sign", "band", "frozen"})
WITHOUT_BAND = ALL - {"band"}

METHODS: dict[str, Method] = {
    "grpo": Method(grpo.token_advantage, ALL),
    "datc": Method(datc.token_advantage, ALL, needs_credit=True, needs_reward_gradient=True),
    "datc_no_angle": Method(datc_no_angle.token_advantage, ALL, needs_credit=True, needs_reward_gradient=True),
    "datc_shuffled": Method(datc_shuffled.token_advantage, ALL, needs_credit=True, needs_reward_gradient=True),
    "datc_random": Method(datc_random.token_advantage, ALL),
    "entropy": Method(entropy.token_advantage, ALL),
    "red": Method(red.token_advantage, frozenset({"mean", "frozen"}), needs_token_rewards=True),
    "p2t": Method(p2t.token_advantage, frozenset(), needs_reward_gradient=True, needs_embedding=True),
    "oar_g": Method(oar_g.token_advantage, WITHOUT_BAND, needs_reward_gradient=True, needs_embedding=True),
    "oar_p": Method(oar_p.token_advantage, WITHOUT_BAND, needs_left_out_scores=True),
    "delta": Method(delta.token_advantage, frozenset({"sign"}), needs_hidden=True, needs_rollout=True),
    "arca": Method(arca.token_advantage, WITHOUT_BAND, needs_hidden=True, needs_base_hidden=True),
}

__all__ = ["METHODS", "CreditInputs", "Method", "TokenAdvantage"]
