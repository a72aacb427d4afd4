"""From hidden states and a scored rollout to token advantages: what a trainer of one's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from datc_kernels import TokenCredit, TokenWeights, allocate_weights, checks, linear_credit
from datc_train.types import ScoredRollout


@dataclass(frozen=True)
class TokenAdvantages:
    """N response tokens end to end, of B responses."""

    value: Tensor  # [N] float32 (float64 for float64 hidden), A w: what takes the place of the response's advantage A
    weights: TokenWeights  # weight [N], temperature [B]
    credit: TokenCredit  # logprob, entropy, credit, ... [N]; constants here


def token_advantages(
    hidden: Tensor,
    head_weight: Tensor,
    response_ids: Tensor,
    lengths: Tensor,
    scored: ScoredRollout,
    advantage: Tensor,
    *,
    head_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ceiling: float = 4.0,
    utility: str = "advantage",
    backend: str | None = None,
) -> TokenAdvantages:
    """A w for every response token, w the DATC weights (mean 1 in each response, within [1/ceiling, ceiling]).

    Args:
        hidden: [N, D], what the LM head reads to predict each response token, of the policy that sampled; no gradient is kept.
        head_weight: [V, D]; head_bias [V] or None.
        response_ids: [N], responses end to end, stop tokens included.
        lengths: [B], sums to N.
        scored: of the same tokens, from `RewardModel.score` with gradient; tensors move to hidden's device.
        advantage: [B], one a response, however the trainer makes it; read back once to see that it is finite.
        temperature: of sampling. softcap, logit_scale: of the model's logits.
        vocab_size: columns that can be sampled; None: all.
        ceiling, utility, backend: see `datc_kernels.allocate_weights` and `linear_credit`.

    Raises:
        ValueError: beginning with the argument's name; `scored` without gradient among them.
        RuntimeError: a backend that cannot run here.
    """
    if scored.reward_grad is None or scored.reward_embedding is None:
        raise ValueError("scored: expected a rollout scored with gradient=True, got one without reward_grad")
    checks.check_float("advantage", advantage, 1, "[B]")
    advantage = advantage.detach().float()
    broken = (~torch.isfinite(advantage)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(f"advantage: expected finite numbers, got {advantage[broken[0]]:g} for response {broken[0]}")
    device = hidden.device
    advantage = advantage.to(device)
    with _own_names():
        credit = linear_credit(
            hidden.detach(),
            head_weight.detach(),
            response_ids,
            scored.reward_grad.to(device),
            scored.reward_embedding.to(device),
            bias=None if head_bias is None else head_bias.detach(),
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            vocab_size=vocab_size,
            backend=backend,
        )
        assert credit.credit is not None
        weights = allocate_weights(
            credit.credit,
            advantage,
            lengths,
            frozen=scored.frozen.to(device),
            ceiling=ceiling,
            utility=utility,
            backend=backend,
        )
    response = advantage.repeat_interleave(lengths, output_size=len(response_ids))
    return TokenAdvantages(response * weights.weight, weights, credit)


# Of the ops' arguments, as they are called here.
_NAMES = {
    "weight": "head_weight",
    "bias": "head_bias",
    "token_ids": "response_ids",
    "reward_grad": "scored: reward_grad",
    "reward_embedding": "scored: reward_embedding",
    "frozen": "scored: frozen",
}


@contextmanager
def _own_names() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        name, colon, text = str(error).partition(":")
        raise ValueError(f"{_NAMES.get(name, name)}{colon}{text}") from error
