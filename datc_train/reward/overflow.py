"""Rows longer than the reward model's context that are left out rather than cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from datc_train.reward.mapped_rows import MappedRow

OnOverflow = Literal["error", "neutral"]


def unmapped(row: MappedRow) -> MappedRow:
    """The row with no token of the response mapped to it."""
    return replace(row, position=np.full_like(row.position, -1))


def fill_with_group_mean(scores: Tensor, read: Sequence[int], count: int, group_size: int) -> Tensor:
    """[count] float32 scores of groups of `group_size`: those that were read, and for the others their group's mean.

    At the mean, the advantage is 0 (to float32's rounding of the score). A group that was not read at all gets zeros, and
    equal scores have no advantage either.

    Args:
        scores: [len(read)] float32.
        read: rows that they belong to.
    """
    if len(read) == count:
        return scores
    full = torch.full((count,), torch.nan, dtype=torch.float64, device=scores.device)
    full[torch.tensor(read, dtype=torch.long, device=scores.device)] = scores.double()
    missing = torch.ones(count, dtype=torch.bool, device=scores.device)
    missing[torch.tensor(read, dtype=torch.long, device=scores.device)] = False
    groups, holes = full.view(-1, group_size), missing.view(-1, group_size)
    known = (~holes).sum(1, keepdim=True)
    mean = groups.masked_fill(holes, 0.0).sum(1, keepdim=True) / known.clamp(min=1)
    return torch.where(holes, mean, groups).view(-1).float()
