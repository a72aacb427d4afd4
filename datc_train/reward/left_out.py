"""Scores of responses with one token left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from datc_train.reward.model import RewardModel
from datc_train.types import Messages


def left_out_scores(
    reward: RewardModel,
    prompts: Sequence[Messages],
    responses: Sequence[Sequence[int]],
    group_size: int,
    score: Tensor,
    frozen: Tensor,
    *,
    stop_ids: Collection[int] | None = None,
) -> Tensor:
    """R(x, y without token t), [N] float32; R(x, y) itself at frozen positions, which are not tried.

    The row is built anew from what is left, as the reward model would read it. One row a free token, all of a response's
    together: they share its prompt, which is read once, and go through in batches of the reward model's token budget. Two
    hundred tokens a response cost two hundred times its scoring.

    Args:
        reward: scores without gradient.
        prompts, responses, group_size, stop_ids: as for `RewardModel.score`.
        score: [B] of the whole responses. frozen: [N].
    """
    out = score.repeat_interleave(torch.tensor([len(r) for r in responses], device=score.device))
    start = 0
    for index, response in enumerate(responses):
        free = torch.nonzero(~frozen[start : start + len(response)]).squeeze(1).tolist()
        if free:
            shorter = [[*response[:t], *response[t + 1 :]] for t in free]
            prompt = prompts[index // group_size]
            scored = reward.score([prompt], shorter, len(shorter), gradient=False, stop_ids=stop_ids)
            out[torch.tensor(free, device=out.device) + start] = scored.score
        start += len(response)
    return out
