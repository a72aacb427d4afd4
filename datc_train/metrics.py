"""A line of metrics a step. Undefined is None, never NaN."""

from __future__ import annotations

import math
from typing import Any

import torch

from datc_kernels import Candidates, effective_sample_ratio, predicted_gain
from datc_train.advantages import frac_reward_zero_std
from datc_train.step import Step


def step_metrics(
    step: int,
    one: Step,
    *,
    ceiling: float,
    learning_rate: float,
) -> dict[str, Any]:
    """The keys of metrics.jsonl.

    reward_mean            raw score over all sampled responses
    reward_std             mean over groups of the population standard deviation of the raw score
    kl                     mean k3 over tokens, to the policy that training started from
    sampler_difference     mean over tokens of |log p of the sampler - log p of the training pass|, same weights
    grad_norm, update_norm the gradient's norm before clipping, and that of the parameters' change
    length_mean            tokens of a response, whatever the loss masks
    frac_truncated         responses that were cut off
    ess_ratio              mean over responses of (sum w)^2 / (T sum w^2)
    tau_mean, band_share   temperature of the weights, and the share of responses with a weight at the band's edge
    negative_share         share of positions that are not frozen with A d < 0
    predicted_gain         mean over responses of sum (w - 1) A d
    """
    rollout, scored, advantage, result = one.rollout, one.scored, one.advantage, one.update
    lengths, free = rollout.lengths.to(result.weight.device), ~scored.frozen.to(result.weight.device)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    weight = result.weight
    at_edge = ((weight >= ceiling * (1 - 1e-4)) | (weight <= (1 + 1e-4) / ceiling)) & (weight != 1.0)
    band = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
    band[owner[at_edge]] = True
    negative = gain = None
    if result.credit is not None:
        signed = advantage[owner] * result.credit
        negative = float((signed[free] < 0).float().mean()) if bool(free.any()) else None
        gain = float(predicted_gain(result.credit, advantage, weight, lengths).mean())
    groups = scored.score.double().view(-1, rollout.group_size)
    seconds = dict(one.clock.seconds)
    total = sum(seconds.values())
    line = {
        "step": step,
        "reward_mean": float(scored.score.double().mean()),
        "reward_std": float(groups.std(dim=1, correction=0).mean()),
        "frac_reward_zero_std": frac_reward_zero_std(scored.score, rollout.group_size),
        "kl": result.kl,
        "entropy": float(result.entropy.mean()) if len(weight) else None,
        "length_mean": float(lengths.double().mean()),
        "frac_truncated": float((~rollout.finished).double().mean()),
        "clip_fraction": result.clip_fraction,
        "sampler_difference": result.sampler_difference,
        "grad_norm": result.grad_norm,
        "update_norm": result.update_norm,
        "learning_rate": learning_rate,
        "ess_ratio": float(effective_sample_ratio(weight, lengths).mean()),
        "tau_mean": float(result.temperature.mean()),
        "band_share": float(band.double().mean()),
        "negative_share": negative,
        "predicted_gain": gain,
        "tokens_per_second": len(rollout.response_ids) / total if total > 0 else None,
        **{f"seconds_{phase}": value for phase, value in seconds.items()},
        "seconds_step": total,
    }
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}


def sample_lines(
    step: int,
    one: Step,
    tokenizer: Any,
    limit: int,
) -> list[dict[str, Any]]:
    """The first `limit` responses of a step, token by token, as samples.jsonl keeps them.

    candidates, candidate_ids, candidate_probability, candidate_advantage [T][k]: the policy's most likely tokens at each
    position and their A_v; absent where none are asked for, the last null without a reward gradient.
    """
    rollout, scored, advantage, result = one.rollout, one.scored, one.advantage, one.update
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
                "credit": None if result.credit is None else result.credit[span].tolist(),
                "weight": result.weight[span].tolist(),
                "probability": result.logprob[span].exp().tolist(),
                "frozen": scored.frozen[span].tolist(),
                **_candidates(result.candidates, span, tokenizer),
            }
        )
    return lines


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
