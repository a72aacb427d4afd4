"""What a credit method is given and what it gives back.

Legend: N tokens, B responses, D policy hidden size, K reward-model hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from datc_kernels import TokenCredit, TokenWeights


@dataclass(frozen=True)
class CreditInputs:
    """B whole responses, N tokens end to end, on one device. What a method did not ask for (see `Method`) is None."""

    credit: TokenCredit  # fields [N]; the reward fields are None unless the method needs credit
    advantage: Tensor  # [B] float32
    lengths: Tensor  # [B] int64, sums to N
    frozen: Tensor  # [N] bool
    ceiling: float
    utility: str
    responses: Tensor  # [B] int64, which of the rollout's responses these are
    seed: tuple[int, int]  # of the run, and the rollout's number
    score: Tensor  # [B] float32, the raw reward
    reward_grad: Tensor | None = None  # [N, K] dR / d(input embedding), 0 where not mapped
    embedding: Tensor | None = None  # [N, K] the token's own input embedding in the reward model
    pad_embedding: Tensor | None = None  # [K] that of the reward model's pad token
    token_reward: Tensor | None = None  # [N] R(x, y up to t) - R(x, y up to t - 1), 0 where not mapped
    left_out_score: Tensor | None = None  # [N] R(x, y without token t), R(x, y) itself where frozen
    hidden: Tensor | None = None  # [N, D] what the LM head read to predict the token
    base_hidden: Tensor | None = None  # [N, D] the same of the policy that training started from


@dataclass(frozen=True)
class TokenAdvantage:
    value: Tensor  # [N] float32
    weights: TokenWeights  # value = A weight where A is not 0; what additive methods do is written as a weight too
    notes: Mapping[str, Tensor] = field(default_factory=dict)  # metrics' names to [B], one a response; NaN where undefined


@dataclass(frozen=True)
class Method:
    """A credit method, what it needs beside the policy's own pass, and what it promises of its weights.

    Needs are computed only for methods that have them:

        needs_credit             `credit` with its reward fields, in the same kernel as the log-probabilities
        needs_reward_gradient    the gradient of the reward model's score
        needs_embedding          beside the gradient, the tokens' embeddings in the reward model
        needs_token_rewards      the reward model's score after every token: one more forward pass over its rows
        needs_left_out_scores    one score a token: N more rows
        needs_hidden             the policy's hidden states
        needs_base_hidden        those of the policy without its adapter: the reference pass, kept as [N, D]
        needs_rollout            the whole rollout at once: a pass of the policy without gradient before the update

    Promises, of the weights of one response and held to by tests: "mean" their mean is 1; "sign" none is negative; "band" they
    lie within [1 / ceiling, ceiling]; "frozen" they are exactly 1 at frozen positions.
    """

    token_advantage: Callable[[CreditInputs], TokenAdvantage]
    promises: frozenset[str]
    needs_credit: bool = False
    needs_reward_gradient: bool = False
    needs_embedding: bool = False
    needs_token_rewards: bool = False
    needs_left_out_scores: bool = False
    needs_hidden: bool = False
    needs_base_hidden: bool = False
    needs_rollout: bool = False

    def __post_init__(self) -> None:
        assert self.needs_reward_gradient or not (self.needs_credit or self.needs_embedding)

    @property
    def needs_of_reward(self) -> str | None:
        """What only a reward model can give, in words; None where any reward function does."""
        if self.needs_reward_gradient:
            return "the gradient"
        if self.needs_token_rewards:
            return "the score after every token"
        return "scores of shortened responses" if self.needs_left_out_scores else None


def weighted(
    inputs: CreditInputs, weight: Tensor, temperature: Tensor | None = None, notes: Mapping[str, Tensor] | None = None
) -> TokenAdvantage:
    """A w from weights [N]; temperature [B], 1 where the method has none."""
    weight = weight.float()
    value = inputs.advantage.repeat_interleave(inputs.lengths, output_size=len(weight)) * weight
    temperature = torch.ones_like(inputs.advantage) if temperature is None else temperature
    return TokenAdvantage(value, TokenWeights(weight, temperature), notes or {})


def added(inputs: CreditInputs, term: Tensor, notes: Mapping[str, Tensor] | None = None) -> TokenAdvantage:
    """A + term [N]. As a weight that is 1 + term / A, and 1 where A = 0."""
    advantage = inputs.advantage.repeat_interleave(inputs.lengths, output_size=len(term))
    value = (advantage.double() + term.double()).float()
    weight = torch.where(advantage == 0, 1.0, value.double() / advantage.double()).float()
    return TokenAdvantage(value, TokenWeights(weight, torch.ones_like(inputs.advantage)), notes or {})
