"""A step's responses in passes of bounded size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from datc_train.types import Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Some whole responses of a rollout."""

    responses: Tensor  # [b] indices of responses
    tokens: Tensor  # [n] indices of their tokens in the rollout's [N], response after response
    prompt_ids: list[tuple[int, ...]]  # [b]
    response_ids: list[Tensor]  # [b] of [length]
    lengths: Tensor  # [b]


def micro_batches(rollout: Rollout, budget: int) -> list[MicroBatch]:
    """Responses in batches of at most `budget` padded tokens (at least one response each).

    A prompt's responses stay together, so that a batch reads it once; groups come by their longest row, and the rows of a
    group by their length.
    """
    lengths = rollout.lengths.tolist()
    rows = [len(rollout.prompt_ids[i // rollout.group_size]) + length for i, length in enumerate(lengths)]
    size = rollout.group_size
    longest = [max(rows[first : first + size]) for first in range(0, len(rows), size)]
    order = sorted(range(len(rows)), key=lambda i: (-longest[i // size], i // size, -rows[i]))
    groups: list[list[int]] = []
    width = 0
    for i in order:
        width = max(width, rows[i])
        if groups and (len(groups[-1]) + 1) * width <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
            width = rows[i]
    start = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    device = rollout.response_ids.device
    batches = []
    for group in groups:
        spans = [torch.arange(start[i], start[i] + lengths[i], device=device) for i in group]
        batches.append(
            MicroBatch(
                responses=torch.tensor(group, device=device),
                tokens=torch.cat(spans),
                prompt_ids=[rollout.prompt_ids[i // rollout.group_size] for i in group],
                response_ids=[rollout.response_ids[span] for span in spans],
                lengths=rollout.lengths[torch.tensor(group, device=device)],
            )
        )
    return batches
