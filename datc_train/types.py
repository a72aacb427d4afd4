"""The small frozen types that the stages hand on, left to right.

    prompts -> Rollout -> ScoredRollout -> TokenCredit -> TokenWeights -> loss -> update

Legend: P prompts, G responses a prompt (a *group*), B = P * G responses, N response tokens laid end to end (stop tokens
included), K width of the reward model's embedding. `TokenCredit` and `TokenWeights` come from `datc_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat messages, and whatever other columns its row had (handed to reward functions)."""

    messages: Messages
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """What was sampled: G responses to each of P prompts, group after group."""

    prompts: tuple[Prompt, ...]  # [P]
    prompt_ids: tuple[tuple[int, ...], ...]  # [P] rows of token ids, the policy's template applied
    group_size: int  # G
    response_ids: Tensor  # [N] int64, responses end to end, the stop token included where there is one
    lengths: Tensor  # [B] int64, sums to N
    sampler_logprob: Tensor  # [N] float32, log-probability that the sampler drew each token with
    finished: Tensor  # [B] bool, True where the response ended with a stop token


@dataclass(frozen=True)
class ScoredRollout:
    """The reward half of the same N tokens."""

    score: Tensor  # [B] float32, the raw score
    reward_grad: Tensor | None  # [N, K] in the reward model's dtype, zero rows where not mapped; None without gradient
    mapped: Tensor  # [N] bool, True where the reward model's row holds the same id on the same bytes
    frozen: Tensor  # [N] bool, True where the weight stays 1; contains every unmapped position
    reward_embedding: Tensor | None  # [rows, K] what the reward model's embedding module returns for every id
    pad_embedding: Tensor | None = None  # [K] of the reward model's own pad token; None where there is none or not asked for
    unread: Tensor | None = None  # [B] bool, rows the reward model could not hold, at their group's mean score; None: none
    token_reward: Tensor | None = None  # [N] float32, what each token adds to the score so far; None where not asked for
    left_out_score: Tensor | None = None  # [N] float32, the score without the token; None where not asked for
    parts: dict[str, Tensor] = field(default_factory=dict)  # [B] float32 of each of several rewards, NaN: no part in that score
