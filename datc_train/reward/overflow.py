"""Rows longer than the reward model's context that are left out rather than cut."""

from __future__ import annotations

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


def at_group_mean(values: Tensor, unread: Tensor, group_size: int) -> Tensor:
    """[B] `values`, those of unread rows replaced by the mean of their group's others, with which their advantage is 0.

    Exactly so up to the rounding of `values`' dtype. A group that was not read at all gets zeros, and equal rewards have no
    advantage either.

    Args:
        values: [B] of groups of `group_size`; what unread rows hold does not matter.
        unread: [B] bool.
    """
    holes = unread.view(-1, group_size)
    groups = values.double().view(-1, group_size).masked_fill(holes, 0.0)
    mean = groups.sum(1, keepdim=True) / (~holes).sum(1, keepdim=True).clamp(min=1)
    return torch.where(holes, mean, groups).flatten().to(values.dtype)
