"""From a rollout to its scored half: by a reward model, by a function of text, or by the weighted sum of several of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from datc_train.credit import METHODS, Method
from datc_train.credit_point import EMBEDDING, CreditPoint
from datc_train.reward import RewardModel
from datc_train.reward.functions import RewardFunction, call_functions, name_of, of_prompts
from datc_train.reward.left_out import left_out_scores
from datc_train.reward.several import RewardPart, WeightedRewards, weighted_sum
from datc_train.types import Prompt, Rollout, ScoredRollout

Reward = RewardModel | RewardFunction | WeightedRewards


def parts_of(reward: Any) -> tuple[RewardPart, ...]:
    """The parts of several rewards; a single one is a part of weight 1."""
    return reward.parts if isinstance(reward, WeightedRewards) else (RewardPart(reward, 1.0, name_of(reward)),)


def check_reward(reward: object, method: str) -> None:
    """Raises ValueError where the method needs of a reward model what `reward` does not have, and for what is no reward."""
    parts = parts_of(reward)
    for part in parts:
        if isinstance(part.reward, nn.Module):
            raise ValueError(
                f"reward: expected RewardModel(model, tokenizer) around it, got the bare module {type(part.reward).__name__}"
            )
        if not callable(part.reward):
            raise ValueError(f"reward: expected a RewardModel or a function, got {type(part.reward).__name__}")
    models, needed = [part.model for part in parts if part.model is not None], METHODS[method].needs_of_reward
    if needed is not None and not models:
        without = ", ".join(name for name, m in METHODS.items() if m.needs_of_reward is None)
        came = ", ".join(type(part.reward).__name__ + (" of weight 0" if part.weight == 0 else "") for part in parts)
        raise ValueError(
            f"reward: method {method!r} needs {needed} of a RewardModel, got {came}; methods that work with any reward "
            f"function: {without}"
        )
    for model in models:
        if method == "p2t" and model.pad_embedding is None:
            raise ValueError(
                "reward: method 'p2t' needs a reward model whose tokenizer has a pad token with an embedding, "
                f"got pad token {model.tokenizer.pad_token!r}"
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
    reward: Reward,
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: tuple[int, ...],
    *,
    gradient: bool,
    method: Method | None = None,
    point: CreditPoint = EMBEDDING,
) -> ScoredRollout:
    """Raw scores [B], with `gradient` the reward's gradient of every token at `point`, and what else `method` needs.

    A function's scores have no token part: it says the same of every token. Without a reward model that counts, all tokens
    are mapped (a function reads responses as they are), and frozen are the tokenizer's special tokens and those that end a
    response.

    Raises ValueError as `RewardModel.score`, and for a function's values that are not one finite number (or, beside other
    rewards, None) a response; RewardError for a function that raises or hangs.
    """
    responses = [part.tolist() for part in rollout.response_ids.cpu().split(rollout.lengths.tolist())]

    def read(model: RewardModel, gradient: bool = gradient, method: Method | None = method) -> ScoredRollout:
        return _of_model(model, rollout, responses, stop_ids, gradient, method, point)

    def with_left_out(model: RewardModel, scored: ScoredRollout, frozen: Tensor) -> ScoredRollout:
        prompts, size = [prompt.messages for prompt in rollout.prompts], rollout.group_size
        left_out = left_out_scores(model, prompts, responses, size, scored.score, frozen, stop_ids=stop_ids)
        return replace(scored, left_out_score=left_out)

    needs_left_out = method is not None and method.needs_left_out_scores
    if isinstance(reward, RewardModel):
        scored_alone = read(reward)
        return with_left_out(reward, scored_alone, scored_alone.frozen) if needs_left_out else scored_alone
    parts = parts_of(reward)
    functions = {part.name: part.reward for part in parts if not isinstance(part.reward, RewardModel)}
    timeout = reward.timeout if isinstance(reward, WeightedRewards) else None
    # First: what fails there has cost no pass of a model.
    called = _call(functions, rollout, responses, tokenizer, timeout) if functions else {}
    models = {part.name: (part.model, part.weight) for part in parts if part.model is not None}
    scored = {name: read(model) for name, (model, _) in models.items()}
    unweighted = [part for part in parts if isinstance(part.reward, RewardModel) and part.model is None]
    scores = called | {name: one.score for name, one in scored.items()}
    scores |= {part.name: read(part.reward, False, None).score for part in unweighted if isinstance(part.reward, RewardModel)}
    device = next(iter(scored.values())).score.device if scored else rollout.response_ids.device
    scores = {part.name: scores[part.name].to(device) for part in parts}
    counted = [part for part in parts if part.weight != 0]
    _check_scored({part.name: scores[part.name] for part in counted}, rollout)
    terms = [scores[part.name].double().nan_to_num(nan=0.0) * part.weight for part in counted if part.name in functions]
    constant = torch.stack(terms).sum(0) if terms else None
    if not scored:
        assert constant is not None
        total = _of_functions(constant.float(), rollout, tokenizer, stop_ids)
        _check_range(total.score)
        return replace(total, parts=scores if isinstance(reward, WeightedRewards) else {})
    assert isinstance(reward, WeightedRewards)

    def summed(scored: list[ScoredRollout]) -> ScoredRollout:
        return weighted_sum(
            scored,
            [weight for _, weight in models.values()],
            response_ids=rollout.response_ids,
            lengths=rollout.lengths,
            group_size=rollout.group_size,
            constant=constant,
            join=reward.join,
        )

    total = summed(list(scored.values()))
    if needs_left_out:  # of the tokens that are free in the sum
        total = summed([with_left_out(models[name][0], one, total.frozen) for name, one in scored.items()])
    _check_range(total.score)
    return replace(total, parts=scores)


def _of_model(
    model: RewardModel,
    rollout: Rollout,
    responses: list[list[int]],
    stop_ids: tuple[int, ...],
    gradient: bool,
    method: Method | None,
    point: CreditPoint,
) -> ScoredRollout:
    prompts, size = [prompt.messages for prompt in rollout.prompts], rollout.group_size
    scored = model.score(prompts, responses, size, gradient=gradient, stop_ids=stop_ids, **point.arguments())
    if method is not None and method.needs_embedding:
        scored = replace(scored, pad_embedding=model.pad_embedding)
    if method is not None and method.needs_token_rewards:
        scored = replace(scored, token_reward=model.token_rewards(prompts, responses, size, stop_ids=stop_ids))
    return scored


def _of_functions(
    scores: Tensor, rollout: Rollout, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...]
) -> ScoredRollout:
    special = torch.tensor(sorted({*tokenizer.all_special_ids, *stop_ids}), dtype=torch.int64, device=rollout.response_ids.device)
    frozen = torch.isin(rollout.response_ids, special)
    return ScoredRollout(scores.to(frozen.device), None, torch.ones_like(frozen), frozen, None)


def _call(
    functions: dict[str, RewardFunction],
    rollout: Rollout,
    responses: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    timeout: float | None,
) -> dict[str, Tensor]:
    """[B] of each: reward functions in TRL's sense, of conversational prompts and completions, ids, and the prompts' columns.

    NaN is where a function has returned None: it does not apply to that sample.
    """
    owners = [rollout.prompts[i // rollout.group_size] for i in range(len(responses))]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    arguments: dict[str, Any] = {
        key: [owner.columns.get(key) for owner in owners] for key in sorted({k for owner in owners for k in owner.columns})
    }
    arguments |= {
        "prompts": [owner.messages for owner in owners],
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": responses,
    }
    found = call_functions(functions, arguments, of_prompts(rollout.prompts, len(responses)), timeout)
    return {name: _scores(name, found[name], owners) for name in functions}


def _scores(name: str, values: Any, owners: list[Prompt]) -> Tensor:
    if not hasattr(values, "__len__") or len(values) != len(owners):
        raise ValueError(f"reward: expected {len(owners)} numbers from {name}, got {values!r:.80}")
    scores = torch.tensor([_number(value) for value in values], dtype=torch.float32)
    for i in (~scores.isfinite()).nonzero().flatten().tolist():
        if values[i] is None:
            continue
        prompt = owners[i].messages[-1]["content"]
        raise ValueError(f"reward: expected finite float32 numbers from {name}, got {values[i]!r:.80} for {prompt[:80]!r}")
    return scores


def _check_scored(scores: dict[str, Tensor], rollout: Rollout) -> None:
    """Raises ValueError for a response of which no reward that counts has said anything."""
    nothing = torch.stack(list(scores.values())).isnan().all(0).nonzero().flatten().tolist()
    if nothing:
        prompt = rollout.prompts[nothing[0] // rollout.group_size].messages[-1]["content"]
        names = " and ".join(scores)
        raise ValueError(f"reward: expected a number from {names}, got None for {prompt[:80]!r}")


def _check_range(total: Tensor) -> None:
    if not bool(total.isfinite().all()):
        raise ValueError("reward_weights: expected sums within float32's range, got one beyond it")


def _number(value: Any) -> float:
    """NaN for what is no number; numbers of NumPy and torch are numbers."""
    if isinstance(value, str | bytes) or value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
