"""Which tokens are replaced, and by what.

    positions      mapped ones of a response, free and frozen apart, each set drawn evenly without replacement; none at which the
                   policy leaves less than 1e-4 for anything but its token: no sample would ever differ there
    alternatives   distinct, drawn from p(. | what stands before) without the token itself and without stop tokens,
                   renormalised after every draw: the k largest of log p_v + Gumbel noise

Legend: k alternatives, V vocabulary, D the policy's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from datc_train.modes import evaluating
from datc_train.policy import Policy
from datc_train.types import Rollout, ScoredRollout

LEFT = 1e-4  # probability of everything but the token, at least
_ROWS = 64  # positions whose [., V] logits are there at a time


@dataclass(frozen=True)
class Drawn:
    """A position and what is to stand there instead."""

    response: int
    position: int  # in the response
    index: int  # among all N response tokens
    frozen: bool
    token: int
    log_probability: np.ndarray  # [1 + k] float64: of the token, then of the alternatives
    alternatives: tuple[int, ...]  # [k]


def draw_positions(
    rollout: Rollout, scored: ScoredRollout, stop_ids: Sequence[int], free: int, frozen: int, seed: int
) -> list[tuple[int, int]]:
    """(response, position) pairs in order: of each response at most `free` free and `frozen` frozen ones.

    Raises ValueError that begins with `policy` where no free position is left, and says whether any was.
    """
    ids, lengths = rollout.response_ids.cpu(), rollout.lengths.tolist()
    stops = torch.isin(ids, torch.tensor(sorted(stop_ids), dtype=torch.int64))
    left = -torch.expm1(rollout.sampler_logprob.cpu().double())
    mapped, is_frozen = scored.mapped.cpu() & ~stops, scored.frozen.cpu()
    some = mapped & (left >= LEFT)
    if not bool((mapped & ~is_frozen).any()):
        raise ValueError(
            f"policy: expected responses with free positions (words that the reward model's row holds), got none among the "
            f"{len(ids)} tokens of {len(lengths)} responses"
        )
    if not bool((some & ~is_frozen).any()):
        raise ValueError(
            f"policy: expected tokens that the policy might have sampled otherwise, got a probability above {1 - LEFT} for "
            f"every one of {int((mapped & ~is_frozen).sum())} (it repeats itself; a higher temperature may help)"
        )
    found, start = [], 0
    for response, length in enumerate(lengths):
        chance = np.random.default_rng((seed, response, 0))
        places: list[int] = []
        for wanted, kind in ((free, ~is_frozen), (frozen, is_frozen)):
            there = np.flatnonzero((some & kind)[start : start + length].numpy())
            places += chance.choice(there, size=min(wanted, len(there)), replace=False).tolist()
        found += [(response, place) for place in sorted(places)]
        start += length
    return found


def draw_alternatives(
    policy: Policy,
    rollout: Rollout,
    scored: ScoredRollout,
    where: Sequence[tuple[int, int]],
    stop_ids: Sequence[int],
    count: int,
    *,
    temperature: float,
    vocab_size: int,
    seed: int,
) -> list[Drawn]:
    """What replaces the tokens at these positions, in order. The logits are those that the credit sees.

    Raises ValueError that begins with `alternatives` where the vocabulary has not so many.
    """
    assert scored.reward_embedding is not None
    columns = min(vocab_size, scored.reward_embedding.shape[0])  # the credit is of columns that the reward model has a row for
    if count > columns - 1 - len(stop_ids):
        raise ValueError(f"alternatives: expected at most {columns - 1 - len(stop_ids)}, the vocabulary's others, got {count}")
    parts = [part.cpu() for part in rollout.response_ids.split(rollout.lengths.tolist())]
    first = (rollout.lengths.cumsum(0) - rollout.lengths).tolist()
    drawn = []
    for response in sorted({response for response, _ in where}):
        places = [position for owner, position in where if owner == response]
        chance = np.random.default_rng((seed, response, 1))
        prompt = rollout.prompt_ids[response // rollout.group_size]
        with torch.no_grad(), evaluating(policy.model):
            hidden = policy.hidden_states([prompt], [parts[response]])[places]
        for rows, some in zip(hidden.split(_ROWS), _chunks(places, _ROWS), strict=True):
            log_p = _log_probabilities(policy, rows, temperature, vocab_size)
            for line, position in zip(log_p, some, strict=True):
                token = int(parts[response][position])
                others = line[:columns].copy()
                others[[token, *stop_ids] if token < columns else list(stop_ids)] = -np.inf
                best = np.argsort(-(others + chance.gumbel(size=columns)), kind="stable")[:count]
                drawn.append(
                    Drawn(
                        response=response,
                        position=position,
                        index=first[response] + position,
                        frozen=bool(scored.frozen[first[response] + position]),
                        token=token,
                        log_probability=line[[token, *best]],
                        alternatives=tuple(best.tolist()),
                    )
                )
    return drawn


def _log_probabilities(policy: Policy, hidden: Tensor, temperature: float, vocab_size: int) -> np.ndarray:
    """[rows, vocab_size] float64."""
    with torch.no_grad():
        logits = (hidden @ policy.weight.T).float()
        if policy.bias is not None:
            logits = logits + policy.bias.float()
        logits = logits * policy.logit_scale
        if policy.softcap is not None:
            logits = policy.softcap * torch.tanh(logits / policy.softcap)
        return torch.log_softmax(logits[:, :vocab_size].double() / temperature, dim=-1).cpu().numpy()


def _chunks(values: list[int], size: int) -> list[list[int]]:
    return [values[i : i + size] for i in range(0, len(values), size)]
