"""From raw scores to the rewards that advantages are made of (arXiv 2610.32772). Gradients are of the raw score.

    sigma0 = median over groups, at the initial policy, of the group's population standard deviation
    r = R - 0.5 sigma0 clip((8 - L) / 8, 0, 1) - 2 sigma0 clip((L - 1024) / 1024, 0, 1)        L tokens, EOS included
    r = (the group's smallest r) - 1                                                           for a degenerate response

Statistics are float64 throughout. A group whose advantage is to be made of r divides by max(std, 0.5 sigma0).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from datc_train.disk import write_whole, written

SHORT, LONG = 8, 1024  # tokens: below the one and above the other there is something to pay
SHORT_PRICE, LONG_PRICE = 0.5, 2.0  # of sigma0, at length 0 and at twice LONG
FLOOR = 0.5  # of sigma0, the least that a group's deviations are divided by
_NEWLINES = "\n" * 32


def spread(score: Tensor, group_size: int) -> float:
    """sigma0 of `score [B]`: the median of the groups' population standard deviations.

    Raises:
        ValueError: no score, scores that are no whole groups, or one that is not finite.
    """
    groups = _groups("score", score, group_size)
    if not len(groups):
        raise ValueError("score: expected at least one group, got none")
    deviations = groups.std(1, correction=0)
    return float(deviations.quantile(0.5))


def cached_spread(path: Path, measure: Callable[[], float]) -> float:
    """The run's sigma0, measured once at its start: what `path` holds, else `measure()`, which is then kept there.

    Raises:
        ValueError: the file holds something else.
    """
    if path.exists():
        try:
            value = json.loads(path.read_text(encoding="utf-8"))["sigma0"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected {{'sigma0': number}}, got {path.read_text(encoding='utf-8')[:80]!r}") from error
        return _checked(value)
    value = _checked(measure())
    with written(path):
        write_whole(path, json.dumps({"sigma0": value}) + "\n")
    return value


def is_degenerate(text: str) -> bool:
    """Nothing but whitespace, or 32 newlines in a row."""
    return not text.strip() or _NEWLINES in text


def shaped_rewards(score: Tensor, lengths: Tensor, texts: Sequence[str], group_size: int, sigma0: float) -> Tensor:
    """[B] float64 rewards.

    Args:
        score: [B] raw.
        lengths: [B] tokens of each response, the stop token included.
        texts: [B] what they spell, special tokens left out.
        group_size: responses a prompt.
        sigma0: see `spread`.

    Raises:
        ValueError: sizes that do not fit together, a score or sigma0 that is not finite.
    """
    if not len(score) == len(lengths) == len(texts):
        raise ValueError(f"texts: expected {len(score)} as many as scores and lengths, got {len(texts)} and {len(lengths)}")
    sigma0 = _checked(sigma0)
    size = lengths.to(score.device, torch.float64)
    short = ((SHORT - size) / SHORT).clamp(0, 1)
    long = ((size - LONG) / LONG).clamp(0, 1)
    reward = score.double() - SHORT_PRICE * sigma0 * short - LONG_PRICE * sigma0 * long
    groups = _groups("score", reward, group_size)
    degenerate = torch.tensor([is_degenerate(text) for text in texts], dtype=torch.bool, device=score.device)
    lowest = groups.amin(1, keepdim=True) if len(groups) else groups
    return torch.where(degenerate.view_as(groups), lowest - 1, groups).flatten()


def unfinished_groups(finished: Tensor, group_size: int) -> Tensor:
    """[P] bool: groups none of whose responses ended by itself; they are sampled once more, and then left out."""
    return ~finished.view(-1, group_size).any(1)


def _checked(sigma0: float) -> float:
    if not isinstance(sigma0, int | float) or not math.isfinite(sigma0) or sigma0 < 0:
        raise ValueError(f"sigma0: expected a finite number of at least 0, got {sigma0!r}")
    return float(sigma0)


def _groups(name: str, values: Tensor, group_size: int) -> Tensor:
    if group_size < 1 or len(values) % group_size:
        raise ValueError(f"{name}: expected whole groups of {group_size}, got {len(values)} values")
    groups = values.double().view(-1, group_size)
    bad = torch.nonzero(~groups.isfinite())
    if len(bad):
        group, place = bad[0].tolist()
        raise ValueError(f"{name}: expected finite numbers, got {groups[group, place]} for response {place} of prompt {group}")
    return groups
