"""The probe, top-down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from datc_train.bench.machine import machine
from datc_train.config import Config, check_sources, config_from
from datc_train.data import Row, find_train_prompts, prompt_batch
from datc_train.loop import check_prompts
from datc_train.models import read_policy, resolve_device, reward_device
from datc_train.probe.forecast import Scoring, changes, forecasts, passes_in_all
from datc_train.probe.judge import POINTS, Verdict, recommend, verdict
from datc_train.probe.replacements import Drawn, draw_alternatives, draw_positions
from datc_train.probe.several import SumOfModels
from datc_train.probe.statistics import Values, resamples
from datc_train.probe.types import PointResult, Probe, Replacement
from datc_train.progress import WorkProgress
from datc_train.reward import WeightedRewards
from datc_train.reward.vocabulary import check_same_vocabulary
from datc_train.rewards import given_rewards, load_rewards
from datc_train.rollout import make_sampler
from datc_train.types import Prompt

_FEWEST = 3  # positions of which there is something to correlate


def probe(
    config: Config | dict[str, Any],
    policy: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward: Any = None,
    prompts: str | Sequence[Row] | None = None,
    *,
    responses: int = 48,
    positions: int = 4,
    alternatives: int = 6,
    quiet: bool = True,
) -> Probe:
    """How well each credit point forecasts what replacing a token does to the score; nothing is trained or changed.

    Responses are sampled from the policy as a run would sample them (in this process: `sampler` is no matter), some of their
    tokens replaced by others that the policy might have sampled there, and the responses scored anew. Seeded by the config's
    seed: the same call finds the same, but for seconds.

    Args:
        config: a `Config`, or a dict of its keys. Whatever else is given replaces what the config would load:
        policy: a causal language model of transformers, or a PEFT model. Needs `tokenizer`.
        tokenizer: the policy's.
        reward: a `RewardModel`, or what has its method `score`; of several rewards the weighted sum of the reward models.
        prompts: a file of JSON lines, or a list of texts, messages, rows or `Prompt`s.
        responses: so many, each to a prompt of its own; where prompts are fewer, whole groups of at least so many.
        positions: free positions of each response, and half as many frozen ones, as far as it has them.
        alternatives: at each position, at least 2.
        quiet: no progress is shown.

    Raises:
        ValueError: what cannot be, beginning with its key: before anything is scored (a reward without a gradient, prompts that
            cannot be read) or as soon as responses are there (no free position, nothing that the policy would sample instead).
    """
    asked = config_from(config)
    config = replace(asked, sampler="transformers")
    for key, value, least in (("responses", responses, 2), ("positions", positions, 1), ("alternatives", alternatives, 2)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{key}: expected a whole number of at least {least}, got {value!r}")
    check_sources(config, policy=policy, reward=reward, prompts=prompts)
    if isinstance(reward, list | tuple | WeightedRewards) or (reward is not None and config.reward_weights is not None):
        reward = given_rewards(config, reward)
    if reward is not None and not isinstance(reward, WeightedRewards):
        check_gradient(reward)
    device = resolve_device(config.device)
    some, group_size = _choose(find_train_prompts(config, prompts), responses, config.seed)
    actor = read_policy(config, device, policy, tokenizer)
    if reward is None:
        reward = load_rewards(config, reward_device(config, device), actor.tokenizer)
        if not isinstance(reward, WeightedRewards):
            check_gradient(reward)
    elif hasattr(reward, "policy_tokenizer"):
        check_same_vocabulary(actor.tokenizer, reward.policy_tokenizer)
    sampler = make_sampler(config, actor).with_group_size(group_size)
    check_prompts(sampler, reward, some)
    if isinstance(reward, WeightedRewards):
        reward = SumOfModels(reward)

    with WorkProgress("probe", quiet) as progress:
        progress.begin("sampling", 1)
        rollout = sampler.sample(some, seed=config.seed)
        scoring = Scoring(reward, rollout, sampler.stop_ids)
        progress.advance()
        progress.begin("drawing alternatives", 1)
        first = scoring(scoring.prompts, scoring.responses, 1, POINTS[0])
        where = draw_positions(rollout, first, sampler.stop_ids, positions, -(-positions // 2), config.seed)
        drawn = draw_alternatives(
            actor,
            rollout,
            first,
            where,
            sampler.stop_ids,
            alternatives,
            temperature=config.temperature,
            vocab_size=sampler.vocab_size,
            seed=config.seed,
        )
        progress.advance()
        progress.begin("replacing tokens", len({one.response for one in drawn}))
        found = changes(scoring, drawn, progress.advance)
        kept = [i for i, change in enumerate(found) if change is not None]
        drawn, change = [drawn[i] for i in kept], [x for x in found if x is not None]
        _check_enough(drawn)
        progress.begin("gradients", passes_in_all(len(scoring.responses), POINTS))
        guess, cost = forecasts(scoring, drawn, POINTS, progress.advance)

    counts = resamples(len(scoring.responses), config.seed)
    points, judged = [], []
    for point in POINTS:
        free, frozen = (_part(drawn, guess[point], change, counts, kind) for kind in (False, True))
        assert free is not None
        quality = None if frozen is None else frozen.quality
        points.append(PointResult(point, point.name, free.quality, quality, cost[point]))
        judged.append((point, point.name, free))
    recommended, reason = recommend(judged)
    return Probe(
        points=tuple(points),
        recommended=recommended,
        reason=reason,
        responses=len(scoring.responses),
        replacements=tuple(
            _replacement(one, change[i], {point.name: guess[point][i] for point in POINTS}, actor.tokenizer)
            for i, one in enumerate(drawn)
        ),
        settings=asked.to_dict() | {"responses": responses, "positions": positions, "alternatives": alternatives},
        machine=machine(),
    )


def check_gradient(reward: Any) -> None:
    """Raises ValueError for what has no gradient with respect to a response's tokens."""
    if isinstance(reward, nn.Module) or not hasattr(reward, "score"):
        kind = getattr(reward, "__name__", None) or type(reward).__name__
        words = "RewardModel(model, tokenizer) around it" if isinstance(reward, nn.Module) else "a reward model"
        raise ValueError(f"reward: expected {words}: the probe reads its gradient; got {kind}, which has none")


def _choose(prompts: list[Prompt], responses: int, seed: int) -> tuple[list[Prompt], int]:
    """Prompts, and responses to each."""
    group_size = -(-responses // len(prompts))
    count = -(-responses // group_size)
    return prompt_batch(prompts, 1, count, seed), group_size


def _check_enough(drawn: Sequence[Drawn]) -> None:
    free = sum(not one.frozen for one in drawn)
    if free < _FEWEST:
        raise ValueError(f"responses: expected enough for {_FEWEST} free positions, got {free}; sample more or longer ones")


def _part(
    drawn: Sequence[Drawn], guess: Sequence[Values], change: Sequence[Values], counts: Values, frozen: bool
) -> Verdict | None:
    """Of the frozen positions or of the free ones; None where they are too few."""
    kept = [i for i, one in enumerate(drawn) if one.frozen == frozen]
    if len(kept) < _FEWEST:
        return None
    return verdict([drawn[i] for i in kept], [guess[i] for i in kept], [change[i] for i in kept], counts)


def _replacement(one: Drawn, change: Values, guess: dict[str, Values], tokenizer: PreTrainedTokenizerBase) -> Replacement:
    probability = [_short(p) for p in (2.718281828459045**one.log_probability).tolist()]
    return Replacement(
        response=one.response,
        position=one.position,
        frozen=one.frozen,
        token=one.token,
        token_probability=probability[0],
        alternatives=one.alternatives,
        probability=tuple(probability[1:]),
        text=tuple(tokenizer.decode([token]) for token in (one.token, *one.alternatives)),
        change=tuple(map(_short, change)),
        forecast={name: tuple(map(_short, values)) for name, values in guess.items()},
    )


def _short(value: float) -> float:
    """Seven digits: what float32 holds."""
    return float(f"{value:.7g}")
