"""A line of metrics a step. Undefined is None, never NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from datc_kernels import Candidates, effective_sample_ratio, predicted_gain
from datc_kernels.allocate_weights.diagnostics import at_band
from datc_train.advantages import frac_reward_zero_std
from datc_train.reward.shaping import unfinished_groups
from datc_train.step import Step
from datc_train.types import ScoredRollout


def step_metrics(
    step: int,
    one: Step,
    *,
    ceiling: float,
    learning_rate: float,
) -> dict[str, Any]:
    """The keys of metrics.jsonl.

    step, rollout          both from 1; a rollout may give several steps
    frac_reward_zero_std   share of groups whose scores are all equal
    entropy                mean over tokens, nats
    clip_fraction          share of tokens whose gradient the clip stopped
    learning_rate          of this step
    tokens_per_second      response tokens over seconds_step
    seconds_*              of each phase; seconds_step is their sum
    reward_mean            raw score over all sampled responses
    reward_shaped_mean     what the advantages are made of, over all responses; None without reward_shaping
    frac_groups_left_out   groups that no response finished, left out of the loss; None without reward_shaping
    reward_std             mean over groups of the population standard deviation of the raw score
    reward_<name>_mean, reward_<name>_std   the same of each of several rewards, without its weight, over the responses that it
                           has a score for
    kl                     mean k3 over tokens, to the policy that training started from
    sampler_difference     mean over tokens of |log p of the sampler - log p of the training pass|, same weights
    correction_mean, correction_cut_share   mean importance weight of the sampler's correction, and tokens that its bound held
    grad_norm, update_norm the gradient's norm before clipping, and that of the parameters' change
    length_mean            tokens of a response, whatever the loss masks
    frac_truncated         responses that were cut off
    ess_ratio              mean over responses of (sum w)^2 / (T sum w^2)
    tau_mean, band_share   temperature of the weights, and the share of responses with a weight at the band's edge
    negative_share         share of positions that are not frozen with A d < 0
    predicted_gain         mean over responses of sum (w - 1) A d
    top_tenth_share        mean over responses of the share of |w| that the largest tenth of them has; 0.1 for equal ones
    and what the credit method notes, mean over the responses where it is defined

    With several updates a rollout they are of the responses that this update learned from, weights and credit as the policy
    that sampled had them, entropy and KL as this update found the policy.
    """
    rollout, scored, advantage, result = one.lesson.rollout, one.lesson.scored, one.lesson.advantage, one.update
    shares = result.shares
    weight = shares.weight
    lengths, free = rollout.lengths.to(weight.device), ~scored.frozen.to(weight.device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    negative = gain = None
    if shares.credit is not None:
        signed = advantage[owner] * shares.credit
        negative = float((signed[free] < 0).float().mean()) if bool(free.any()) else None
        gain = float(predicted_gain(shares.credit, advantage, weight, lengths).mean())
    groups = scored.score.double().view(-1, rollout.group_size)
    seconds = dict(one.clock.seconds)
    total = sum(seconds.values())
    line = {
        "step": step,
        "rollout": one.lesson.number,
        "reward_mean": float(scored.score.double().mean()),
        **_shaped(one),
        "reward_std": float(groups.std(dim=1, correction=0).mean()),
        **part_metrics(scored, rollout.group_size),
        "frac_reward_zero_std": frac_reward_zero_std(scored.score, rollout.group_size),
        "kl": result.kl,
        "entropy": float(result.entropy.mean()) if len(weight) else None,
        "length_mean": float(lengths.double().mean()),
        "frac_truncated": float((~rollout.finished).double().mean()),
        "clip_fraction": result.clip_fraction,
        "sampler_difference": result.sampler_difference,
        "correction_mean": result.correction_mean,
        "correction_cut_share": result.correction_cut,
        "grad_norm": result.grad_norm,
        "update_norm": result.update_norm,
        "learning_rate": learning_rate,
        "ess_ratio": float(effective_sample_ratio(weight, lengths).mean()),
        "tau_mean": float(shares.temperature.mean()),
        "band_share": float(at_band(weight, lengths, ceiling).double().mean()),
        "negative_share": negative,
        "predicted_gain": gain,
        "top_tenth_share": _top_tenth_share(weight, lengths),
        **{name: _mean(values) for name, values in shares.notes.items()},
        "tokens_per_second": len(rollout.response_ids) / total if total > 0 else None,
        **{f"seconds_{phase}": value for phase, value in seconds.items()},
        "seconds_step": total,
    }
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}


def _shaped(one: Step) -> dict[str, float | None]:
    rollout, reward = one.lesson.rollout, one.lesson.reward
    if reward is None:
        return {"reward_shaped_mean": None, "frac_groups_left_out": None}
    left_out = unfinished_groups(rollout.finished, rollout.group_size)
    return {"reward_shaped_mean": float(reward.mean()), "frac_groups_left_out": float(left_out.double().mean())}


def part_metrics(scored: ScoredRollout, group_size: int) -> dict[str, float | None]:
    """reward_<name>_mean and reward_<name>_std of each of several rewards; None without a score."""
    line: dict[str, float | None] = {}
    for name, score in scored.parts.items():
        groups = score.double().view(-1, group_size)
        spread = (groups - groups.nanmean(dim=1, keepdim=True)).square().nanmean(dim=1).sqrt()
        for key, value in (("mean", groups.nanmean()), ("std", spread.nanmean())):
            line[f"reward_{name}_{key}"] = None if bool(value.isnan()) else float(value)
    return line


def part_scores(scored: ScoredRollout, response: int) -> dict[str, dict[str, float | None]]:
    """The line's `rewards` of one response; nothing for a single reward."""
    found = {name: float(score[response]) for name, score in scored.parts.items()}
    return {"rewards": {name: None if math.isnan(value) else value for name, value in found.items()}} if found else {}


def sample_lines(
    step: int,
    one: Step,
    tokenizer: Any,
    limit: int,
) -> list[dict[str, Any]]:
    """The first `limit` responses of a step, token by token, as samples.jsonl keeps them.

    candidates, candidate_ids, candidate_probability, candidate_advantage [T][k]: the policy's most likely tokens at each
    position and their A_v; absent where none are asked for, the last null without a reward gradient.
    rewards {name: score}: of several rewards, each without its weight; null where one has no part in the sum.
    """
    rollout, scored, advantage, result = one.lesson.rollout, one.lesson.scored, one.lesson.advantage, one.update
    shares = result.shares
    lines, start = [], 0
    for i, length in enumerate(rollout.lengths.tolist()[:limit]):
        span = slice(start, start + length)
        start += length
        ids = rollout.response_ids[span].tolist()
        prompt = rollout.prompts[i // rollout.group_size]
        lines.append(
            {
                "step": step,
                "prompt": prompt.messages,
                "response": tokenizer.decode(ids, skip_special_tokens=True),
                "token_ids": ids,
                "tokens": [tokenizer.decode([token]) for token in ids],
                "advantage": float(advantage[i]),
                "reward": float(scored.score[i]),
                **part_scores(scored, i),
                "credit": None if shares.credit is None else shares.credit[span].tolist(),
                "weight": shares.weight[span].tolist(),
                "probability": shares.logprob[span].exp().tolist(),
                "frozen": scored.frozen[span].tolist(),
                **_candidates(result.candidates, span, tokenizer),
            }
        )
    return lines


def _top_tenth_share(weight: Tensor, lengths: Tensor) -> float | None:
    """None without a response whose weights are not all 0."""
    shares = []
    for part in weight.abs().double().cpu().split(lengths.tolist()):
        total = float(part.sum())
        if total > 0:  # of 15 weights the largest and half of the second
            tenth = len(part) / 10
            ordered = part.sort(descending=True).values
            whole = int(tenth)
            shares.append((float(ordered[:whole].sum()) + (tenth - whole) * float(ordered[whole])) / total)
    return sum(shares) / len(shares) if shares else None


def _mean(values: Tensor) -> float | None:
    defined = values[~values.isnan()]
    return float(defined.mean()) if len(defined) else None


def _candidates(found: Candidates | None, span: slice, tokenizer: Any) -> dict[str, Any]:
    """Those of one response."""
    if found is None:
        return {}
    ids = found.token_ids[span].tolist()
    text = {token: tokenizer.decode([token]) for token in {token for row in ids for token in row}}
    return {
        "candidates": [[text[token] for token in row] for row in ids],
        "candidate_ids": ids,
        "candidate_probability": found.probability[span].tolist(),
        "candidate_advantage": None if found.advantage is None else found.advantage[span].tolist(),
    }
