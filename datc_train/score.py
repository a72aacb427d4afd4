"""From a rollout to its scored half: by a reward model, or by a function of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from datc_train.credit import METHODS, Method
from datc_train.credit_point import EMBEDDING, CreditPoint
from datc_train.reward import RewardModel
from datc_train.reward.left_out import left_out_scores
from datc_train.types import Prompt, Rollout, ScoredRollout

RewardFunction = Callable[..., list[float]]


def check_reward(reward: object, method: str) -> None:
    """Raises ValueError where the method needs a gradient that `reward` does not have, TypeError for what is not callable."""
    if isinstance(reward, nn.Module):
        raise ValueError(f"reward: expected RewardModel(model, tokenizer) around it, got the bare module {type(reward).__name__}")
    needed = METHODS[method].needs_of_reward
    if needed is None or isinstance(reward, RewardModel):
        if not callable(reward):
            raise ValueError(f"reward: expected a RewardModel or a function, got {type(reward).__name__}")
        if isinstance(reward, RewardModel) and method == "p2t" and reward.pad_embedding is None:
            raise ValueError(
                "reward: method 'p2t' needs a reward model whose tokenizer has a pad token with an embedding, "
                f"got pad token {reward.tokenizer.pad_token!r}"
            )
        return
    without = [name for name, m in METHODS.items() if m.needs_of_reward is None]
    raise ValueError(
        f"reward: method {method!r} needs {needed} of a RewardModel, got {type(reward).__name__}; "
        f"methods that work with any reward function: {', '.join(without)}"
    )


def check_adapter(method: str, *, has_one: bool) -> None:
    """Raises ValueError where the method compares the policy with and without an adapter that it does not have."""
    if METHODS[method].needs_base_hidden and not has_one:
        raise ValueError(f"method: {method!r} compares the policy with and without its adapter, got one without (lora: null)")


# What every call passes beside the prompts' own columns.
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")


def check_columns(prompts: Sequence[Prompt]) -> None:
    """Raises ValueError for a column whose name a reward function already gets something else under."""
    for index, prompt in enumerate(prompts):
        taken = [name for name in RESERVED_COLUMNS if name in prompt.columns]
        if taken:
            raise ValueError(
                f"prompts: expected other columns than {', '.join(RESERVED_COLUMNS)}, which reward functions get from the "
                f"trainer; got {', '.join(taken)} in prompt {index}"
            )


def score_rollout(
    reward: RewardModel | RewardFunction,
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: tuple[int, ...],
    *,
    gradient: bool,
    method: Method | None = None,
    point: CreditPoint = EMBEDDING,
) -> ScoredRollout:
    """Raw scores [B], with `gradient` the reward's gradient of every token at `point`, and what else `method` needs.

    A function's scores have no token part. It reads responses as they are, so all tokens count as mapped; frozen are the
    tokenizer's special tokens and those that end a response.
    """
    responses = [part.tolist() for part in rollout.response_ids.cpu().split(rollout.lengths.tolist())]
    prompts = [prompt.messages for prompt in rollout.prompts]
    if isinstance(reward, RewardModel):
        size = rollout.group_size
        scored = reward.score(prompts, responses, size, gradient=gradient, stop_ids=stop_ids, **point.arguments())
        if method is not None and method.needs_embedding:
            scored = replace(scored, pad_embedding=reward.pad_embedding)
        if method is not None and method.needs_token_rewards:
            scored = replace(scored, token_reward=reward.token_rewards(prompts, responses, size, stop_ids=stop_ids))
        if method is not None and method.needs_left_out_scores:
            left_out = left_out_scores(reward, prompts, responses, size, scored.score, scored.frozen, stop_ids=stop_ids)
            scored = replace(scored, left_out_score=left_out)
        return scored
    scores = _call(reward, rollout, responses, tokenizer)
    special = torch.tensor(sorted({*tokenizer.all_special_ids, *stop_ids}), dtype=torch.int64, device=rollout.response_ids.device)
    frozen = torch.isin(rollout.response_ids, special)
    return ScoredRollout(scores.to(frozen.device), None, torch.ones_like(frozen), frozen, None)


def _call(reward: RewardFunction, rollout: Rollout, responses: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """A reward function in TRL's sense: conversational prompts and completions, ids, and the prompts' other columns."""
    owners = [rollout.prompts[i // rollout.group_size] for i in range(len(responses))]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    columns: dict[str, list[Any]] = {
        key: [owner.columns.get(key) for owner in owners] for key in sorted({k for owner in owners for k in owner.columns})
    }
    values = reward(
        prompts=[owner.messages for owner in owners],
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=responses,
        **columns,
    )
    name = getattr(reward, "__name__", type(reward).__name__)
    if not hasattr(values, "__len__") or len(values) != len(responses):
        raise ValueError(f"reward: expected {len(responses)} numbers from {name}, got {values!r:.80}")
    scores = torch.tensor([_number(value) for value in values], dtype=torch.float32)
    for i in (~scores.isfinite()).nonzero().flatten().tolist():
        prompt = owners[i].messages[-1]["content"]
        raise ValueError(f"reward: expected finite float32 numbers from {name}, got {values[i]!r:.80} for {prompt[:80]!r}")
    return scores


def _number(value: Any) -> float:
    """NaN for what is no number; numbers of NumPy and torch are numbers."""
    if isinstance(value, str | bytes) or value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
