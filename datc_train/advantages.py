"""A group's scores become its responses' advantages.

Legend: P groups of G responses, B = P G.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(score: Tensor, group_size: int, *, floor: float = 0.0) -> Tensor:
    """A = (r - mean) / max(std, floor) within each group of `group_size` consecutive scores; population std.

    score [B], any floating dtype -> [B] float32, computed in float64. A group whose scores are all equal gets exactly
    0, found by comparing its maximum with its minimum: the rounding of a mean is no reason to learn. Such a group still
    has its KL gradient where the loss has a KL term.

    Raises ValueError for a score that is not [B] or not finite (with its row), a B that whole groups do not fill, a
    group of fewer than two, and a floor that is negative or not finite.
    """
    groups = _groups(score, group_size)
    if not 0.0 <= floor < float("inf"):
        raise ValueError(f"floor: expected a finite number >= 0, got {floor}")
    deviation = groups - groups.mean(1, keepdim=True)
    std = deviation.square().mean(1, keepdim=True).sqrt()
    equal = _equal(groups)[:, None]
    advantage = deviation / std.clamp(min=floor).masked_fill(equal, 1.0)
    return advantage.masked_fill(equal, 0.0).reshape(-1).float()


def group_deviations(score: Tensor, group_size: int, *, floor: float = 0.0) -> Tensor:
    """max(std, floor) of each response's group, [B] float32: times the advantage, r - mean. Arguments and errors as for
    `group_advantages`."""
    groups = _groups(score, group_size)
    std = groups.std(1, correction=0, keepdim=True).clamp(min=floor).masked_fill(_equal(groups)[:, None], 0.0)
    return std.expand_as(groups).reshape(-1).float()


def frac_reward_zero_std(score: Tensor, group_size: int) -> float:
    """The share of groups whose scores are all equal: without shaping nothing but a KL term can teach them. Arguments and
    errors as for `group_advantages`."""
    return float(_equal(_groups(score, group_size)).double().mean())


def _groups(score: Tensor, group_size: int) -> Tensor:
    """[P, G] float64."""
    if score.dim() != 1 or not score.is_floating_point():
        raise ValueError(f"score: expected [B] of a floating dtype, got {list(score.shape)} of {score.dtype}")
    if group_size < 2:
        raise ValueError(f"group_size: expected at least 2, got {group_size}; one response has nothing to compare with")
    if score.numel() == 0 or score.numel() % group_size:
        raise ValueError(f"score: expected whole groups of {group_size}, got {score.numel()} scores")
    if not bool(score.isfinite().all()):
        row = int((~score.isfinite()).nonzero()[0])
        raise ValueError(f"score: expected finite values, got {float(score[row])} in row {row}")
    return score.detach().double().reshape(-1, group_size)


def _equal(groups: Tensor) -> Tensor:
    """[P] bool"""
    return torch.eq(groups.amax(1), groups.amin(1))
