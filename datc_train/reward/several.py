"""Several rewards as one: the weighted sum of their scores, with the gradient of that sum.

    R(x, y) = sum_i w_i R_i(x, y)                       i over reward models and functions
    u_v     = sum_i w_i <g_i, E_i,v>                    over reward models: a function says the same of every token

The second is the inner product of two longer vectors, so gradients and tables are laid side by side:

    reward_grad      = [w_1 g_1, w_2 g_2, ...]          [N, K_1 + K_2 + ...]
    reward_embedding = [E_1, E_2, ...]                  [rows that every table has, K_1 + K_2 + ...]

and one kernel call has the credit of the sum, w_1 d_1 + w_2 d_2 + ..., for credit is linear in u.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from datc_train.reward.functions import RewardFunction, name_of
from datc_train.reward.model import RewardModel
from datc_train.reward.overflow import at_group_mean
from datc_train.types import ScoredRollout

_TAKEN = ("shaped",)  # reward_shaped_mean is another metric


@dataclass(frozen=True)
class RewardPart:
    """One reward of several. Of weight 0 it is scored and logged, and has no part in score or gradient.

    Raises ValueError for a weight that is not finite.
    """

    reward: RewardModel | RewardFunction
    weight: float
    name: str  # in metrics, reward_<name>_mean, and in errors

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"reward_weights: expected finite numbers, got {self.weight} for {self.name}")

    @property
    def model(self) -> RewardModel | None:
        """The reward model where this is one that counts."""
        return self.reward if isinstance(self.reward, RewardModel) and self.weight != 0 else None


@dataclass(frozen=True)
class WeightedRewards:
    """The weighted sum of `parts`, whose names are distinct.

    timeout: seconds that a function may take for a rollout; None: no bound.

    Raises ValueError without a part whose weight is not 0.
    """

    parts: tuple[RewardPart, ...]
    timeout: float | None = None
    join: JoinedTables = field(default_factory=lambda: JoinedTables(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("reward: expected at least one, got none")
        if not any(part.weight for part in self.parts):
            raise ValueError("reward_weights: expected one that is not 0, got only zeros")
        assert len({part.name for part in self.parts}) == len(self.parts)

    @property
    def models(self) -> list[RewardModel]:
        """All reward models, those of weight 0 among them."""
        return [part.reward for part in self.parts if isinstance(part.reward, RewardModel)]

    @property
    def has_function(self) -> bool:
        return len(self.models) < len(self.parts)


def weighted_rewards(
    rewards: Sequence[RewardModel | RewardFunction],
    weights: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    timeout: float | None = None,
) -> WeightedRewards:
    """Of rewards with their weights (None: all 1), under their own names or `names`, made distinct.

    Raises ValueError for weights that are not as many, not finite, or all 0.
    """
    check_count(weights, len(rewards))
    names = distinct_names([name_of(reward) for reward in rewards] if names is None else names)
    weights = [1.0] * len(rewards) if weights is None else weights
    return WeightedRewards(tuple(map(RewardPart, rewards, map(float, weights), names)), timeout)


def check_count(weights: Sequence[float] | None, count: int) -> None:
    """Raises ValueError for weights of another number of rewards."""
    if weights is not None and len(weights) != count:
        raise ValueError(f"reward_weights: expected {count}, one for each reward, got {len(weights)}: {list(weights)}")


def distinct_names(names: Sequence[str]) -> list[str]:
    """Names that can stand in a metric's: other characters become "_", and what was there before gets a number."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("_") or "reward"
        number, free = 1, plain
        while free in (*found, *_TAKEN):
            number += 1
            free = f"{plain}_{number}"
        found.append(free)
    return found


class JoinedTables:
    """Embedding tables side by side, in the rows that all of them have; made once for the same tables."""

    def __init__(self) -> None:
        self._of: list[Tensor] = []
        self._joined: Tensor | None = None

    def __call__(self, tables: list[Tensor]) -> Tensor:
        if len(tables) == 1:
            return tables[0]
        same = len(tables) == len(self._of) and all(a is b for a, b in zip(tables, self._of, strict=True))
        if self._joined is None or not same:
            rows, device = min(map(len, tables)), tables[0].device
            dtype = reduce(torch.promote_types, (table.dtype for table in tables))
            self._joined = torch.cat([table[:rows].to(device, dtype) for table in tables], dim=1)
            self._of = tables
        return self._joined


def weighted_sum(
    scored: Sequence[ScoredRollout],
    weights: Sequence[float | Tensor],
    *,
    response_ids: Tensor,
    lengths: Tensor,
    group_size: int,
    constant: Tensor | None = None,
    join: Callable[[list[Tensor]], Tensor] | None = None,
) -> ScoredRollout:
    """The scored rollout of sum_i w_i R_i, from those of the reward models R_i on the same N tokens of B responses.

    A token is mapped where it is in any model, and frozen where its content says so or no model maps it. Token rewards and
    left-out scores, where all have them, are sums too. An id without a row in every table is not mapped, as with one model.

    Args:
        scored: of one model at least; all with gradient, or none.
        weights: a number each, not 0, or one for every response [B].
        response_ids: [N] int64. lengths: [B] int64.
        group_size: responses a prompt. A response that one model could not read counts as unread: it has the mean score of
            its group's others and no token of it is mapped.
        constant: [B], what rewards without a token part add to the score.
        join: lays tables side by side, for a caller who keeps the result.

    Returns:
        score [B] float32, summed in float64; reward_grad [N, sum K_i] in the models' widest dtype (float32 for float16 ones
        of other weights than 1) and reward_embedding, or None; pad_embedding [sum K_i] where all have one; on the device
        of the first.
    """
    if len(scored) == 1 and constant is None and isinstance(weights[0], float) and weights[0] == 1:
        return scored[0]
    first = scored[0]
    device = first.score.device
    owner = torch.repeat_interleave(lengths.to(device), output_size=len(response_ids))

    def total(values: Sequence[Tensor], *, tokens: bool) -> Tensor:
        terms = [
            _times(value.to(device).double(), w, owner if tokens else None) for value, w in zip(values, weights, strict=True)
        ]
        if constant is not None and not tokens:
            terms.append(constant.to(device).double())
        return reduce(torch.add, terms)

    score = total([one.score for one in scored], tokens=False)
    mapped = reduce(torch.logical_or, (one.mapped.to(device) for one in scored))
    content = reduce(torch.logical_or, ((one.frozen & one.mapped).to(device) for one in scored))
    missing = [one.unread.to(device) for one in scored if one.unread is not None]
    unread = reduce(torch.logical_or, missing) if missing else None
    if unread is not None:
        score = at_group_mean(score, unread, group_size)
        mapped = mapped & ~unread[owner]

    gradients = [one.reward_grad for one in scored if one.reward_grad is not None]
    tables = [one.reward_embedding for one in scored if one.reward_embedding is not None]
    gradient = table = pad = None
    if gradients:
        assert len(gradients) == len(tables) == len(scored)
        table = (JoinedTables() if join is None else join)(tables)
        mapped = mapped & (response_ids.to(device) < len(table))
        weighted = [_times(g.to(device), w, owner) for g, w in zip(gradients, weights, strict=True)]
        dtype = reduce(torch.promote_types, (g.dtype for g in weighted))
        gradient = torch.cat([g.to(dtype) for g in weighted], dim=1)
        gradient.masked_fill_(~mapped[:, None], 0)
        pads = [one.pad_embedding for one in scored if one.pad_embedding is not None]
        pad = torch.cat([p.to(device, table.dtype) for p in pads]) if len(pads) == len(scored) else None

    token_reward = left_out = None
    if all(one.token_reward is not None for one in scored):
        token_reward = total([one.token_reward for one in scored if one.token_reward is not None], tokens=True)
        token_reward = token_reward.masked_fill(~mapped, 0).float()
    frozen = content | ~mapped
    if all(one.left_out_score is not None for one in scored):
        left_out = total([one.left_out_score for one in scored if one.left_out_score is not None], tokens=True)
        left_out = left_out if constant is None else left_out + constant.to(device).double()[owner]
        left_out = torch.where(frozen, score[owner], left_out).float()
    return ScoredRollout(
        score.float(), gradient, mapped, frozen, table, pad, unread=unread, token_reward=token_reward, left_out_score=left_out
    )


def _times(values: Tensor, weight: float | Tensor, owner: Tensor | None) -> Tensor:
    """`values` [B] by a weight, or those of tokens [N] or [N, K] by the weight of their responses; float16 in float32."""
    if isinstance(weight, float) and weight == 1:
        return values
    wide = values.float() if values.dtype == torch.float16 else values
    if not isinstance(weight, Tensor):
        return wide * weight
    weight = weight.to(values.device)
    weight = (weight if owner is None else weight[owner]).to(torch.promote_types(wide.dtype, torch.float32))
    return (wide * (weight if wide.ndim == 1 else weight[:, None])).to(wide.dtype)
